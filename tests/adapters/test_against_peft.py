"""Logits with adapters equal those of the model that PEFT merges each into, within 1e-4 in float32,
many adapters and ranks in one batch, however the tokens are cut into steps."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from adapters.peft_models import loaded_pool, random_adapter
from models.checkpoints import Sequences, expected
from models.families import FAMILIES, random_model
from models.gguf_files import write_gguf

from asyncinfer.models import load_model

TOLERANCE = {"rtol": 0.0, "atol": 1e-4}
QKV = ["q_proj", "k_proj", "v_proj", "o_proj"]
ALL = [*QKV, "gate_proj", "up_proj", "down_proj"]
#: Families whose projections are packed, named and ordered differently, and adapters for each.
CASES: dict[str, tuple[str, str, list[dict[str, Any]]]] = {
    "llama": (
        "llama",
        "plain",
        [
            {"target_modules": ALL, "r": 4},
            {"target_modules": ["q_proj", "v_proj"], "r": 16, "use_rslora": True},
            {"target_modules": "all-linear", "r": 2, "lora_alpha": 3},
            {
                "target_modules": ALL,
                "r": 8,
                "rank_pattern": {"down_proj": 3, "^model.layers.1.self_attn.q_proj": 5},
                "alpha_pattern": {"layers.0.self_attn.o_proj": 2, "v_proj": 32},
            },
            {"target_modules": ["down_proj"], "r": 1, "layers_to_transform": [1]},
        ],
    ),
    "qwen3": ("qwen3", "", [{"target_modules": ALL, "r": 3}, {"target_modules": QKV, "r": 7}]),
    "gemma3": ("gemma3_text", "", [{"target_modules": ALL}, {"target_modules": ["k_proj"]}]),
    "phi3": (
        "phi3",
        "",
        [{"target_modules": ["qkv_proj", "o_proj"]}, {"target_modules": ["gate_up_proj"], "r": 6}],
    ),
    "gpt2": (
        "gpt2",
        "",
        [
            {"target_modules": ["c_attn", "c_proj", "c_fc"], "fan_in_fan_out": True},
            {"target_modules": ["c_attn"], "fan_in_fan_out": True, "r": 9},
        ],
    ),
    "gpt-neox": (
        "gpt_neox",
        "",
        [{"target_modules": ["query_key_value", "dense"]}, {"target_modules": ["dense_4h_to_h"]}],
    ),
    "mixtral": ("mixtral", "", [{"target_modules": QKV}, {"target_modules": ["o_proj"], "r": 2}]),
    "deepseek": (
        "deepseek_v3",
        "",
        [{"target_modules": ["o_proj"]}, {"target_modules": ["o_proj"], "r": 9}],
    ),
    "granite": ("granite", "", [{"target_modules": ALL}, {"target_modules": ["up_proj"]}]),
    "phi": (
        "phi",
        "",
        [{"target_modules": ["q_proj", "dense", "fc1", "fc2"]}, {"target_modules": ["k_proj"]}],
    ),
}


@pytest.mark.parametrize("name", CASES)
def test_logits(name: str, tmp_path: Path) -> None:
    family, kind, configs = CASES[name]
    model = random_model(family, kind or next(iter(FAMILIES[family])))
    model.save_pretrained(tmp_path / "base")
    generator = torch.Generator().manual_seed(5)
    ids = [torch.randint(0, 199, (40,), generator=generator) for _ in range(len(configs) + 1)]
    right, before = [], {name: tensor.clone() for name, tensor in model.state_dict().items()}
    plain = expected(model, ids[-1])
    folders = [tmp_path / str(index) for index in range(len(configs))]
    for index, config in enumerate(configs):
        fresh = random_model(family, kind or next(iter(FAMILIES[family])))
        merged = random_adapter(fresh, folders[index], seed=index, **config)
        model.load_state_dict(merged, strict=False)
        right.append(expected(model, ids[index]))
        model.load_state_dict(before)
        assert (right[-1] - expected(model, ids[index])).abs().max() > 0.1
    right.append(plain)

    decoder = load_model(tmp_path / "base", "cpu", torch.float32, max_context=256)
    pool, slots = loaded_pool(decoder, folders)
    whole = Sequences(decoder, ids)
    mixed = Sequences(decoder, ids)
    for run in (whole, mixed):
        run.pool, run.adapters = pool, [*slots, -1]
    every = range(len(ids))
    whole.step(**{f"s{row}": 40 for row in every})
    mixed.step(**{f"s{row}": 20 - row for row in every})
    for _ in range(12):
        mixed.step(**{f"s{row}": 1 for row in every})
    mixed.step(**{f"s{row}": 8 + row for row in every})
    for run in (whole, mixed):
        for got, right_one in zip(run.logits, right, strict=True):
            torch.testing.assert_close(got, right_one, **TOLERANCE)


@pytest.mark.parametrize("family", ["llama", "smollm3"])
def test_gguf_files_whose_queries_and_keys_were_reordered(family: str, tmp_path: Path) -> None:
    """Of layers without a rotation, too: every fourth of SmolLM3's has none."""
    kind = next(iter(FAMILIES[family]))
    model, ids = random_model(family, kind), torch.arange(3, 33)
    path = write_gguf(model, tmp_path / "model.gguf")
    merged = random_adapter(random_model(family, kind), tmp_path / "one", target_modules=QKV)
    model.load_state_dict(merged, strict=False)
    decoder = load_model(path, "cpu", torch.float32, max_context=64)
    run = Sequences(decoder, [ids])
    run.pool, run.adapters = loaded_pool(decoder, [tmp_path / "one"])
    run.step(s0=30)
    torch.testing.assert_close(run.logits[0], expected(model, ids), **TOLERANCE)
