"""Every family whose layers keep a state, differ in keys and values, or attend to a part of the
tokens, computes what transformers computes, in two shapes."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from models.families import GLOBAL, randomised
from models.gemmas import GEMMAS
from models.hybrids import HYBRIDS, LINEAR
from models.sparse import SPARSE
from safetensors.torch import load_file, save_file
from transformers import MODEL_FOR_CAUSAL_LM_MAPPING

from asyncinfer.kernels import onednn
from asyncinfer.models.family_calls import FamilyCalls
from asyncinfer.models.load import load_weights
from asyncinfer.runner.device import use_cpu_threads
from asyncinfer.testing import check_family
from asyncinfer.testing.family_trial import FamilyTrial, runs

CONFIGS = {**HYBRIDS, **GEMMAS, **SPARSE}
KINDS = sorted(CONFIGS)


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    """Tensors this small are slower on several threads."""
    before = torch.get_num_threads()
    use_cpu_threads(1)
    yield
    use_cpu_threads(before)


@pytest.mark.parametrize("kind", KINDS)
def test_a_family_computes_what_transformers_computes(
    kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    # As on Intel's processors. The other shape has blocks of oneDNN, which take longer to make.
    monkeypatch.setattr(onednn, "reorder_is_faster", lambda weight: False)
    family, configs = CONFIGS[kind]
    check_family(family, configs[0])


@pytest.mark.parametrize("kind", KINDS)
def test_another_shape(kind: str, tmp_path: Path) -> None:
    family, configs = CONFIGS[kind]
    model_class = MODEL_FOR_CAUSAL_LM_MAPPING[type(configs[1])]
    trial = FamilyTrial(model_class, configs[1], tmp_path, seed=1)
    calls = FamilyCalls(model_class.__name__, family(), kind)
    decoder = trial.load(trial.read(calls))
    generator = torch.Generator().manual_seed(2)
    ids = [torch.randint(3, 190, (count,), generator=generator).tolist() for count in (70, 37, 45)]
    ids[2][:32] = ids[1][:32]
    right = [trial.right(each) for each in ids]
    for how, run in runs(decoder, ids).items():
        for row, got in enumerate(run.logits):
            # What a prefix hit left out was not computed, nor what was not fed.
            done = slice(32 if "prefix" in how and row == 2 else 0, run.done[row])
            torch.testing.assert_close(got[done], right[row][done], rtol=0.0, atol=1e-4)


def test_other_names_and_cuts_of_an_olmo_hybrid(tmp_path: Path) -> None:
    """As its makers publish it, and with the norms' names of transformers' modules."""
    _, configs = HYBRIDS["olmo-hybrid"]
    config: Any = configs[1]
    randomised(config).save_pretrained(tmp_path)
    file = tmp_path / "model.safetensors"
    saved, right = load_file(file), load_weights(tmp_path, "cpu", torch.float32)
    keys = config.linear_num_key_heads * config.linear_key_head_dim
    values = config.linear_num_value_heads * config.linear_value_head_dim
    published, named = {}, {}
    for name, tensor in saved.items():
        kind = config.layer_types[int(name.split(".")[2])] if ".layers." in name else None
        after = name.replace("feedforward_layer_norm", "post_attention_layernorm")
        published[after if kind == GLOBAL else name] = tensor
        named[after.replace("attention_layer_norm", "input_layernorm")] = tensor
    for layer in (at for at, kind in enumerate(config.layer_types) if kind == LINEAR):
        names = [f"model.layers.{layer}.linear_attn.{part}_conv1d.weight" for part in "qkv"]
        cut = torch.cat([saved[name] for name in names]).split([keys, keys, values])
        # transformers cuts them elsewhere.
        assert any(part.shape != saved[name].shape for name, part in zip(names, cut, strict=True))
        published |= {name: part.clone() for name, part in zip(names, cut, strict=True)}
    for tensors in (published, named):
        assert tensors.keys() != saved.keys()
        save_file(tensors, file)
        found = load_weights(tmp_path, "cpu", torch.float32)
        assert found.keys() == right.keys()
        assert all(torch.equal(found[name], right[name]) for name in right)
