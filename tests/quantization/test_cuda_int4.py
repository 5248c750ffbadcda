"""Layers whose weights stay in 4 bits on a GPU, here by the kernels' reference."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from asyncinfer.kernels.linear_tiles import SMALL_TOKENS
from asyncinfer.quantization import QuantisedWeight, make_grouped_linear, make_linear
from asyncinfer.quantization.cuda_int4 import CudaInt4Linear, Int4Grouped, kernels_read
from asyncinfer.quantization.int4 import quantised_4_bits

NEEDS_GPU = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]


def made(*shape: int, group: int = 32, offsets: bool = True) -> QuantisedWeight:
    rows = quantised_4_bits(torch.randn(shape).flatten(0, -2) / 8, group)
    weight = rows.view(*shape[:-1])
    if offsets:
        return weight
    return QuantisedWeight(weight.numbers, weight.scales, None, weight.dtype)


@pytest.mark.parametrize("tokens", [1, SMALL_TOKENS, SMALL_TOKENS + 1])
@pytest.mark.parametrize("offsets", [True, False])
def test_products(tokens: int, offsets: bool) -> None:
    weight, bias, x = made(24, 64, offsets=offsets), torch.randn(24), torch.randn(tokens, 64)
    exact = F.linear(x, weight.dequantised(), bias)
    layer = CudaInt4Linear(weight, bias)
    torch.testing.assert_close(layer(x), exact)
    torch.testing.assert_close(CudaInt4Linear(weight, None)(x), exact - bias)


@pytest.mark.parametrize("tokens", [3, SMALL_TOKENS + 6])
def test_what_stands_around_the_layer(tokens: int) -> None:
    weight, x = made(24, 64), torch.randn(tokens, 64)
    layer, norm, added = CudaInt4Linear(weight, None), torch.rand(64), torch.randn(tokens, 24)
    exact = F.linear(F.rms_norm(x, (64,), norm, 1e-6), weight.dequantised())
    torch.testing.assert_close(layer.fused(x, norm=norm, residual=added.clone()), exact + added)
    gates, ups = exact.chunk(2, -1)
    torch.testing.assert_close(layer.fused(x, norm=norm, activation="silu"), F.silu(gates) * ups)


def test_experts() -> None:
    weight, bias, x = made(3, 10, 64), torch.randn(3, 10), torch.randn(7, 64)
    ends = torch.tensor([2, 2, 7], dtype=torch.int32)
    floats = weight.dequantised()
    right = torch.cat([F.linear(x[:2], floats[0], bias[0]), F.linear(x[2:], floats[2], bias[2])])
    for layer in (Int4Grouped(weight, bias), make_grouped_linear(weight, bias)):
        torch.testing.assert_close(layer(x, ends), right, rtol=1e-4, atol=1e-4)


def test_only_a_gpu_with_halves_has_the_kernels() -> None:
    assert not kernels_read(made(4, 64))
    assert not kernels_read(made(4, 64).to(torch.bfloat16))


@pytest.mark.parametrize("tokens", [1, 2, 16, 64, 65, 300])
@pytest.mark.parametrize("storage", ["int4", "int4-128"])
@pytest.mark.parametrize("device", [pytest.param("cuda", marks=NEEDS_GPU)])
def test_on_a_gpu(tokens: int, storage: str, device: str) -> None:
    x = torch.randn(tokens, 640, device=device).half()
    weight = torch.randn(512, 640, device=device).half() / 25
    layer = make_linear(weight.clone(), storage=storage)
    assert isinstance(layer, CudaInt4Linear)
    group = 32 if storage == "int4" else 128
    exact = x.double() @ quantised_4_bits(weight, group).dequantised(torch.float64).T
    for _ in range(2):
        torch.testing.assert_close(layer(x).double(), exact, rtol=4e-3, atol=4e-3)
    experts = make_grouped_linear(weight.view(4, 128, 640).clone(), storage=storage)
    assert isinstance(experts, Int4Grouped)
