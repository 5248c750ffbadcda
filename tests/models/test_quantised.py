"""Quantised checkpoints as they are published: logits equal transformers' on the dequantised
weights; files that lie are refused, with the tensor's name."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from models.checkpoints import Sequences, expected
from models.families import DEEPSEEK, SMALL, randomised
from quantization.quantised import CASES, KEPT, Held, mxfp4_experts
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, AutoModelForCausalLM

from asyncinfer.bench.weight_bytes import weight_bytes
from asyncinfer.kernels import native
from asyncinfer.models import examine, load_model
from asyncinfer.quantization.packed import PackedLinear
from asyncinfer.weights import LoadProgress

SEED = 5
WIDE: dict[str, Any] = {**SMALL, "intermediate_size": 96, "head_dim": 16}
#: Three families whose matrices have the sizes of all groups.
FAMILIES: dict[str, dict[str, Any]] = {
    "llama": WIDE,
    "qwen3": {**WIDE, "tie_word_embeddings": True, "head_dim": 32},
    "mixtral": {**WIDE, "num_local_experts": 3, "num_hidden_layers": 1},
}
DEEPSEEK_V3 = {
    **WIDE,
    **DEEPSEEK,
    "q_lora_rank": 32,
    "qk_nope_head_dim": 16,
    "qk_rope_head_dim": 16,
    "v_head_dim": 16,
    "moe_intermediate_size": 32,
    "kv_lora_rank": 64,
    "n_group": 2,
    "topk_group": 2,
}
MATRIX = re.compile(r".*layers\.\d+\..*(?:_proj|w[123])(?:_with_mqa)?\.weight")
EXPERTS = re.compile(r".*experts\.(?:gate_up|down)_proj")
Quantise = Callable[[str, torch.Tensor, torch.Generator], Held | None]


def matrices_by(name: str) -> Quantise:
    """All linear layers but the head and the routers."""

    def quantise(tensor: str, weight: torch.Tensor, random: torch.Generator) -> Held | None:
        if not MATRIX.fullmatch(tensor):
            return None
        return CASES[name].make(*weight.shape, random)

    return quantise


def experts(tensor: str, weight: torch.Tensor, random: torch.Generator) -> Held | None:
    if not EXPERTS.fullmatch(tensor):
        return None
    count, inputs, outputs = weight.shape
    return mxfp4_experts(count, outputs, inputs, random)


def write(
    folder: Path, family: str, changes: dict[str, Any], config: dict[str, Any], quantise: Quantise
) -> Any:
    """A checkpoint with quantised matrices; gives transformers' model of them, dequantised."""
    plain = folder.with_name(f"{folder.name}-plain")
    randomised(AutoConfig.for_model(family, **changes)).save_pretrained(plain)
    tensors, stored = load_file(plain / "model.safetensors"), {}
    random = torch.Generator().manual_seed(SEED)
    for name, weight in tensors.items():
        held = quantise(name, weight, random)
        if held is None:
            stored[name] = weight
            continue
        parts, tensors[name] = held
        stored |= {name.removesuffix(".weight") + part: tensor for part, tensor in parts.items()}
    assert len(stored) > len(tensors)
    save_file(tensors, plain / "model.safetensors", metadata={"format": "pt"})
    folder.mkdir()
    save_file({name: part.clone() for name, part in stored.items()}, folder / "model.safetensors")
    values = json.loads((plain / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**values, "quantization_config": config}))
    return AutoModelForCausalLM.from_pretrained(
        plain, dtype=torch.float32, attn_implementation="eager"
    ).eval()


def check(folder: Path, model: Any, kept: bool = False, packed: bool = True) -> int:
    """Equal logits, and files that count as sound. Gives the bytes of the weights in memory."""
    found = examine(folder)
    assert not found.problems
    corrections = (p for name, p in model.named_buffers() if name.endswith("correction_bias"))
    assert found.parameters == sum(p.numel() for p in (*model.parameters(), *corrections))
    ids = torch.randint(3, 190, (40,), generator=torch.Generator().manual_seed(3))
    seen: list[LoadProgress] = []
    storage = "plain" if kept else "floats"
    decoder = load_model(folder, "cpu", torch.float32, seen.append, storage=storage)
    run = Sequences(decoder, [ids])
    run.step(s0=33)
    for _ in range(7):
        run.step(s0=1)
    right = expected(model, ids)
    assert right.std() > 0.05
    # A CPU's 4-bit layers have scales and offsets in float16.
    torch.testing.assert_close(run.logits[0], right, rtol=0, atol=2e-2 if kept else 1e-4)
    if kept and packed and native.available():
        layer: Any = decoder.layers[0]
        assert isinstance(layer.attention.out.base, PackedLinear)
    assert seen[-1].bytes_done == seen[-1].bytes_total
    assert seen[-1].bytes_total <= (folder / "model.safetensors").stat().st_size
    return weight_bytes(decoder)


def pairs() -> list[tuple[str, str]]:
    """Each case with one family, and each method with all of them."""
    methods: dict[str, list[str]] = {}
    for name, case in CASES.items():
        methods.setdefault(case.config["quant_method"], []).append(name)
    return [
        (names[turn % len(names)], list(FAMILIES)[turn % len(FAMILIES)])
        for names in methods.values()
        for turn in range(max(len(names), len(FAMILIES)))
    ]


@pytest.mark.parametrize(("name", "family"), pairs())
def test_logits(name: str, family: str, tmp_path: Path) -> None:
    changes = {**FAMILIES[family], "num_hidden_layers": 1}
    model = write(tmp_path / "q", family, changes, CASES[name].config, matrices_by(name))
    check(tmp_path / "q", model)
    if name in KEPT:
        check(tmp_path / "q", model, kept=True)


@pytest.mark.parametrize("name", ["fp8 in blocks", "int4 in groups", "floats by output", "gptq"])
def test_deepseek(name: str, tmp_path: Path) -> None:
    """Latent attention, a shared expert, a layer without experts."""
    changes = {**DEEPSEEK_V3}
    model = write(tmp_path / "q", "deepseek_v3", changes, CASES[name].config, matrices_by(name))
    check(tmp_path / "q", model)


@pytest.mark.parametrize(
    "changes", [{}, {"num_local_experts": 5, "tie_word_embeddings": True}, {"hidden_size": 32}]
)
def test_gpt_oss(changes: dict[str, Any], tmp_path: Path) -> None:
    config = {"quant_method": "mxfp4", "modules_to_not_convert": ["model.layers.*.self_attn"]}
    small = {**WIDE, "num_local_experts": 4, "num_experts_per_tok": 2, "sliding_window": 8}
    model = write(tmp_path / "q", "gpt_oss", {**small, **changes}, config, experts)
    floats = check(tmp_path / "q", model)
    # Attention's matrices are floats in the file.
    kept = check(tmp_path / "q", model, kept=True, packed=False)
    if native.available():
        numbers = sum(p.numel() for name, p in model.named_parameters() if EXPERTS.fullmatch(name))
        assert numbers > 0
        # Of four bytes 18 for 32 numbers are left.
        assert floats - kept == numbers * 4 - numbers // 32 * 18
