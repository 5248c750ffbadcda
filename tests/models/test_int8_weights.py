"""Models with int8 weights: what is stored so, and logits like those of the numbers stored."""

from __future__ import annotations

from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from kernels.interpreted import interpreted
from models.checkpoints import Sequences
from models.families import FAMILIES, SMALL, randomised
from transformers import AutoConfig

from asyncinfer.attention import PagedAttention
from asyncinfer.kernels import dispatch
from asyncinfer.layers import FusedLayer
from asyncinfer.models import Decoder, decoder, load_model
from asyncinfer.quantization import linear
from asyncinfer.quantization.cuda_packed import CudaPackedLinear
from asyncinfer.quantization.int8 import Int8Linear, in_8_bits, quantised

#: A model of few launches, one whose linear layers are turned, experts, and a latent KV.
CASES = ("llama", "gpt2", "qwen3_moe", "deepseek_v2")


def written(family: str, folder: Path) -> Path:
    kinds = FAMILIES.get(family, {"plain": {}})
    changes = {**SMALL, **next(iter(kinds.values()))}
    randomised(AutoConfig.for_model(family, **changes)).save_pretrained(folder)
    return folder


def logits(made: Decoder) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(5)
    run = Sequences(made, [torch.randint(0, 199, (n,), generator=generator) for n in (80, 9)])
    run.step(s0=79, s1=8)
    run.step(s0=1, s1=1)
    return run.logits


def loaded(folder: Path, storage: str) -> Decoder:
    return load_model(folder, "cpu", torch.float32, max_context=256, storage=storage)


def rounded(weight: torch.Tensor, bias: torch.Tensor | None) -> Any:
    """A plain layer of the numbers that an int8 one stores."""
    numbers, scales = quantised(weight)
    return linear._FORMATS["plain"](numbers * scales[:, None], bias)


@pytest.mark.parametrize("family", CASES)
def test_logits_are_those_of_the_numbers_stored(
    family: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = written(family, tmp_path)
    got = logits(loaded(folder, "int8"))
    plain = logits(loaded(folder, "plain"))
    monkeypatch.setitem(linear._FORMATS, "int8", rounded)
    for ours, right, before in zip(got, logits(loaded(folder, "int8")), plain, strict=True):
        torch.testing.assert_close(ours, right, rtol=0.0, atol=1e-4)
        assert not torch.equal(right, before)


@pytest.mark.parametrize("kernels", [False, True], ids=["torch", "triton"])
def test_fused_layers(kernels: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As on a GPU, on a CPU's tensors; with the kernels of linear layers themselves, interpreted,
    too."""

    def fused(weight: torch.Tensor, bias: torch.Tensor | None) -> CudaPackedLinear:
        return CudaPackedLinear(in_8_bits(weight), bias)

    folder = written("llama", tmp_path)
    right = logits(loaded(folder, "int8"))
    monkeypatch.setattr(decoder, "has_fused_kernels", lambda weight: True)
    monkeypatch.setattr(decoder, "begin_attention", PagedAttention)
    monkeypatch.setitem(linear._FORMATS, "int8", fused)
    made = loaded(folder, "int8")
    assert all(isinstance(layer, FusedLayer) for layer in made.layers)
    if kernels:
        monkeypatch.setattr(dispatch, "has_triton_kernel", lambda name, _: name == "linear_small")
    with interpreted() if kernels else nullcontext():
        got = logits(made)
    for ours, theirs in zip(got, right, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=0.0, atol=1e-4)


def test_head_embedding_and_routers_stay_as_they_are(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen = []

    def noted(weight: torch.Tensor, bias: torch.Tensor | None) -> Int8Linear:
        seen.append(tuple(weight.shape))
        return Int8Linear(weight, bias)

    monkeypatch.setitem(linear._FORMATS, "int8", noted)
    made = loaded(written("qwen3_moe", tmp_path), "int8")
    config = made.config
    assert config.experts is not None
    assert not isinstance(made.head, Int8Linear)
    sparse = [i for i in range(config.num_layers) if config.layer_experts(i) is not None]
    assert sparse
    assert (config.experts.count, config.hidden_size) not in seen
    # Two of attention in each layer; up and down of each expert, or of a plain layer.
    dense = config.num_layers - len(sparse)
    parts = len(sparse) * 2 * config.experts.count + 2 * dense
    assert len(seen) == 2 * config.num_layers + parts
