"""Int8 weights: what is stored, and the layers that compute with it against float64."""

from __future__ import annotations

import gc
import weakref

import pytest
import torch
import torch.nn.functional as F

from asyncinfer.kernels import onednn, ops
from asyncinfer.quantization import int8 as module
from asyncinfer.quantization import make_grouped_linear, make_linear
from asyncinfer.quantization.cuda_packed import CudaPackedLinear, PackedGrouped
from asyncinfer.quantization.grouped import SeparateLinears
from asyncinfer.quantization.int8 import Int8Linear, in_8_bits, quantised
from asyncinfer.quantization.packed import PackedLinear


@pytest.fixture(autouse=True)
def seeded() -> None:
    torch.manual_seed(0)


def restored(numbers: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
    return numbers.double() * scales.double()[..., None]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("shape", [(1, 1), (5, 33), (3, 7, 40)])
def test_every_number_is_off_by_half_a_scale_at_most(
    dtype: torch.dtype, shape: tuple[int, ...]
) -> None:
    weight = (torch.randn(shape) * torch.logspace(-6, 3, shape[-2])[:, None]).to(dtype)
    numbers, scales = quantised(weight)
    assert (numbers.dtype, scales.dtype) == (torch.int8, torch.float32)
    assert (numbers.shape, scales.shape) == (weight.shape, weight.shape[:-1])
    off = (restored(numbers, scales) - weight.double()).abs()
    assert bool((off <= scales.double()[..., None] * 0.5001).all())
    # Symmetric, and the largest of each row uses all of the range.
    assert int(numbers.min()) >= -127
    assert bool((numbers.abs().amax(-1) == 127).all())


def test_rows_of_zeros_stay_so() -> None:
    numbers, scales = quantised(torch.zeros(2, 8))
    assert not numbers.any()
    assert bool(scales.isfinite().all())


def test_in_parts_as_in_one(monkeypatch: pytest.MonkeyPatch) -> None:
    weight = torch.randn(3, 50, 40)
    whole = quantised(weight)
    monkeypatch.setattr(module, "_BLOCK", 200)
    assert all(torch.equal(a, b) for a, b in zip(quantised(weight), whole, strict=True))


@pytest.mark.parametrize(
    ("dtype", "tolerance"), [(torch.float32, 1e-5), (torch.bfloat16, 3e-2), (torch.float16, 4e-3)]
)
@pytest.mark.parametrize("tokens", [0, 1, 4, 5, 40])
@pytest.mark.parametrize(("outputs", "inputs"), [(64, 64), (70, 33), (3, 32), (1, 1)])
@pytest.mark.parametrize("bias", [True, False])
def test_is_the_map_of_what_is_stored(
    dtype: torch.dtype, tolerance: float, tokens: int, outputs: int, inputs: int, bias: bool
) -> None:
    x, weight = torch.randn(tokens, inputs).to(dtype), torch.randn(outputs, inputs).to(dtype)
    b = torch.randn(outputs).to(dtype) if bias else None
    right = x.double() @ restored(*quantised(weight)).T
    right = right if b is None else right + b.double()
    scale = inputs**0.5
    # The first is of a kernel, where the machine has one for such inputs.
    for layer in (make_linear(weight.clone(), b, storage="int8"), Int8Linear(weight.clone(), b)):
        got = layer(x)
        assert got.dtype is dtype
        torch.testing.assert_close(got.double(), right, rtol=tolerance, atol=tolerance * scale)


def test_torchs_own_product_agrees_with_ours() -> None:
    """Its operator is not public: what it computes is held against the slow way."""
    if not hasattr(torch.ops.aten, "_weight_int8pack_mm"):
        pytest.skip("torch without the product of bfloat16 and int8")
    weight = torch.randn(50, 96).bfloat16()
    layer = Int8Linear(weight, None)
    assert layer.packed is not None
    for tokens in (1, 2, 4):
        x = torch.randn(tokens, 96).bfloat16()
        torch.testing.assert_close(layer(x), layer.by_blocks(x), rtol=3e-2, atol=0.3)
    # It reads beyond rows that are no multiple of its vectors: those never go there.
    assert Int8Linear(torch.randn(50, 95).bfloat16(), None).packed is None
    assert Int8Linear(torch.randn(50, 96), None).packed is None


def test_block_by_block_as_in_one(monkeypatch: pytest.MonkeyPatch) -> None:
    weight, x = torch.randn(50, 40), torch.randn(6, 40)
    whole = Int8Linear(weight, None)(x)
    monkeypatch.setattr(module, "_BLOCK", 300)
    torch.testing.assert_close(Int8Linear(weight, None)(x), whole)
    monkeypatch.setattr(onednn, "available", lambda dtype: False)
    torch.testing.assert_close(Int8Linear(weight, None)(x), whole)


def test_takes_a_quarter_and_lets_the_rest_go() -> None:
    weight = torch.randn(256, 256)
    held = weakref.ref(weight.untyped_storage())
    layer = make_linear(weight, storage="int8")
    if isinstance(layer, PackedLinear):
        assert layer.rows.nbytes == weight.nbytes // 4 + 4 * 256
    else:
        assert isinstance(layer, Int8Linear)
        assert layer.weight.nbytes + layer.scales.nbytes == weight.nbytes // 4 + 4 * 256
    del weight
    gc.collect()
    assert held() is None


@pytest.mark.parametrize("tokens", [0, 1, 64, 65])
@pytest.mark.parametrize("activation", [None, "silu"])
def test_a_gpus_layer(tokens: int, activation: str | None) -> None:
    """On a CPU both of its ways end in torch, and must mean the same."""
    x, weight, bias = torch.randn(tokens, 16), torch.randn(130, 16), torch.randn(130)
    numbers, scales = quantised(weight)
    layer = CudaPackedLinear(in_8_bits(weight), bias)
    expected = F.linear(x, restored(numbers, scales).float(), bias)
    if activation is not None:
        gates, ups = expected.chunk(2, -1)
        expected = F.silu(gates) * ups
    torch.testing.assert_close(layer.fused(x, activation=activation), expected)


@pytest.mark.parametrize("bias", [True, False])
def test_experts(bias: bool) -> None:
    weight, x = torch.randn(4, 10, 24), torch.randn(9, 24)
    b = torch.randn(4, 10) if bias else None
    ends = torch.tensor([3, 3, 8, 9], dtype=torch.int32)
    numbers, scales = quantised(weight)
    right = ops.grouped_linear(x, restored(numbers, scales).float(), ends, b)
    apart = make_grouped_linear(weight.clone(), b, storage="int8")
    assert isinstance(apart, SeparateLinears)
    for layer in (apart, PackedGrouped(in_8_bits(weight), b)):
        torch.testing.assert_close(layer(x, ends), right)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("tokens", [1, 4, 40, 64, 65])
def test_on_a_gpu(tokens: int) -> None:
    x, weight = torch.randn(tokens, 640).cuda().half(), torch.randn(512, 640).cuda().half() / 25
    layer = make_linear(weight, storage="int8")
    assert isinstance(layer, CudaPackedLinear)
    exact = x.double() @ restored(*quantised(weight)).T
    for _ in range(2):
        torch.testing.assert_close(layer(x).double(), exact, rtol=4e-3, atol=4e-3)
    assert isinstance(make_linear(weight.float(), storage="int8"), Int8Linear)
