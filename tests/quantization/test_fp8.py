"""Weights in e4m3: what is stored, and the layers that compute with it against float64."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from models.test_int8_weights import logits, written

from asyncinfer.attention import PagedAttention
from asyncinfer.layers import FusedLayer
from asyncinfer.models import decoder, load_model
from asyncinfer.quantization import fp8 as module
from asyncinfer.quantization import linear, make_linear
from asyncinfer.quantization.fp8 import (
    CudaFp8Linear,
    Fp8Linear,
    in_e4m3,
    quantised_fp8,
    scaled_product,
)
from asyncinfer.quantization.packed import PackedLinear


@pytest.fixture(autouse=True)
def seeded() -> None:
    torch.manual_seed(0)


def restored(weight: torch.Tensor) -> torch.Tensor:
    numbers, scales = quantised_fp8(weight)
    return numbers.double() * scales.double()[..., None]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("shape", [(1, 1), (5, 33), (3, 7, 40)])
def test_every_number_is_off_by_a_sixteenth_at_most(
    dtype: torch.dtype, shape: tuple[int, ...]
) -> None:
    weight = (torch.randn(shape) * torch.logspace(-5, 3, shape[-2])[:, None]).to(dtype)
    before = weight.clone()
    numbers, scales = quantised_fp8(weight)
    assert torch.equal(weight, before)
    assert (numbers.dtype, scales.dtype) == (torch.float8_e4m3fn, torch.float32)
    assert (numbers.shape, scales.shape) == (weight.shape, weight.shape[:-1])
    assert bool((numbers.float().abs().amax(-1) == 448).all())
    exact = weight.double()
    off = (restored(weight) - exact).abs()
    least = exact.abs().amax(-1, keepdim=True) * 2.0**-18
    assert bool((off <= (exact.abs() / 16 + least) * 1.0001).all())


def test_rows_of_zeros_stay_so() -> None:
    numbers, scales = quantised_fp8(torch.zeros(2, 8))
    assert not numbers.float().any()
    assert not scales.any()


def test_in_parts_as_in_one(monkeypatch: pytest.MonkeyPatch) -> None:
    weight = torch.randn(3, 50, 40)
    whole = restored(weight)
    monkeypatch.setattr(module, "_PART", 200)
    assert torch.equal(restored(weight), whole)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_bits_are_moved_as_torch_converts_them(dtype: torch.dtype) -> None:
    """All numbers but NaN, which `quantised_fp8` does not make."""
    every = torch.arange(256, dtype=torch.uint8)
    numbers = every[(every & 127) != 127].view(torch.float8_e4m3fn)[None]
    layer = Fp8Linear(numbers, torch.ones(1), None)
    got = layer(torch.eye(numbers.shape[1], dtype=dtype))
    assert torch.equal(got, numbers.to(dtype).t())


@pytest.mark.parametrize(
    ("dtype", "tolerance"), [(torch.float32, 1e-5), (torch.bfloat16, 3e-2), (torch.float16, 4e-3)]
)
@pytest.mark.parametrize("tokens", [0, 1, 40])
@pytest.mark.parametrize(("outputs", "inputs"), [(64, 64), (70, 33), (1, 1)])
@pytest.mark.parametrize("bias", [True, False])
def test_is_the_map_of_what_is_stored(
    dtype: torch.dtype, tolerance: float, tokens: int, outputs: int, inputs: int, bias: bool
) -> None:
    x, weight = torch.randn(tokens, inputs).to(dtype), torch.randn(outputs, inputs).to(dtype)
    b = torch.randn(outputs).to(dtype) if bias else None
    layer = make_linear(weight.clone(), b, storage="fp8")
    assert isinstance(layer, Fp8Linear | PackedLinear)
    right = x.double() @ restored(weight).T
    right = right if b is None else right + b.double()
    scale = inputs**0.5
    others = Fp8Linear(*quantised_fp8(weight), b)(x), CudaFp8Linear(in_e4m3(weight), b)(x)
    for got in (layer(x), *others):
        assert got.dtype is dtype
        torch.testing.assert_close(got.double(), right, rtol=tolerance, atol=tolerance * scale)


@pytest.mark.parametrize("tokens", [1, 70])
def test_the_product_of_matrix_units(tokens: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """torch computes it on a CPU too: it is that of the rounded inputs and weights."""
    x, weight = torch.randn(tokens, 64).bfloat16(), torch.randn(48, 64).bfloat16()
    numbers, scales = quantised_fp8(weight)
    right = restored(x) @ restored(weight).T
    got = scaled_product(x, numbers, scales)
    assert got.dtype is torch.bfloat16
    torch.testing.assert_close(got.double(), right, rtol=2e-2, atol=2e-2)

    monkeypatch.setattr(module, "_has_fp8_rows", lambda device: True)
    bias = torch.randn(48).bfloat16()
    layer = CudaFp8Linear(in_e4m3(weight), bias)
    assert torch.equal(layer.product(x), got + bias)
    # Few tokens keep their activations.
    exact = x.double() @ restored(weight).T + bias.double()
    if tokens == 1:
        torch.testing.assert_close(layer(x).double(), exact, rtol=5e-2, atol=5e-2)
    else:
        assert torch.equal(layer(x), got + bias)


@pytest.mark.parametrize("family", ["llama", "qwen3_moe"])
def test_logits_are_those_of_the_numbers_stored(
    family: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = written(family, tmp_path)

    def loaded(storage: str) -> list[torch.Tensor]:
        return logits(load_model(folder, "cpu", torch.float32, max_context=256, storage=storage))

    got, plain = loaded("fp8"), loaded("plain")
    monkeypatch.setitem(
        linear._FORMATS, "fp8", lambda w, b: linear._FORMATS["plain"](restored(w).float(), b)
    )
    for ours, right, before in zip(got, loaded("fp8"), plain, strict=True):
        torch.testing.assert_close(ours, right, rtol=0.0, atol=1e-4)
        assert not torch.equal(right, before)


def test_fused_layers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As on a GPU, on a CPU's tensors."""
    folder = written("llama", tmp_path)
    right = logits(load_model(folder, "cpu", torch.float32, max_context=256, storage="fp8"))
    monkeypatch.setattr(decoder, "has_fused_kernels", lambda weight: True)
    monkeypatch.setattr(decoder, "begin_attention", PagedAttention)
    monkeypatch.setitem(linear._FORMATS, "fp8", lambda w, b: CudaFp8Linear(in_e4m3(w), b))
    made = load_model(folder, "cpu", torch.float32, max_context=256, storage="fp8")
    assert all(isinstance(layer, FusedLayer) for layer in made.layers)
    for ours, theirs in zip(logits(made), right, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=0.0, atol=1e-4)
