"""Small linear layers of int8 weights against float64, and as machine code."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from kernels.compiled import recorded
from kernels.targets import Target

from asyncinfer.kernels import ops, triton
from asyncinfer.kernels.linear_tiles import SMALL_TOKENS, tiles_for


def check(target: Target, x: torch.Tensor, outputs: int, *, residual: bool = False) -> None:
    inputs = x.shape[1]
    weight = torch.randint(-127, 128, (outputs, inputs), device=target.device).to(torch.int8)
    scales = torch.rand(outputs, device=target.device) / 64 * inputs**-0.5
    bias, added = target.randn(outputs), target.randn(x.shape[0], outputs)
    exact = x.double() @ (weight.double() * scales.double()[:, None]).T
    given = {"scales": scales[:, None], "code": "int8"}
    for module in (triton, ops):
        y = module.linear_small(x, weight, **given)
        assert y.dtype is target.dtype
        target.check(y, exact)
        if residual:
            y = module.linear_small(x, weight, bias, **given, residual=added)
            target.check(y, exact + bias.double() + added.double())
            y = module.linear_small(x, weight, bias, **given, activation="silu")
            gates, ups = (exact + bias.double()).chunk(2, -1)
            target.check(y, torch.nn.functional.silu(gates) * ups)


@pytest.mark.parametrize(
    ("tokens", "outputs", "inputs"),
    # Every bucket where a sum is split, every shape for each kernel.
    [(tokens, 66, 1100) for tokens in (1, 2, 3, 4, 5, 17, 64)]
    + [(tokens, *shape) for tokens in (1, 2, 17) for shape in ((1, 1), (6, 7), (70, 512))],
)
def test_products(target: Target, tokens: int, outputs: int, inputs: int) -> None:
    check(target, target.randn(tokens, inputs), outputs)


@pytest.mark.parametrize("tokens", [1, 4, 9, 33])
def test_what_comes_after(target: Target, tokens: int) -> None:
    check(target, target.randn(tokens, 600), 70, residual=True)


def test_a_norm_before(target: Target) -> None:
    x, norm = target.randn(2, 96), target.randn(96)
    weight = torch.randint(-127, 128, (34, 96), device=target.device).to(torch.int8)
    scales = torch.rand(34, device=target.device) / 640
    normed = x.double() / (x.double().pow(2).mean(-1, keepdim=True) + 1e-6).sqrt() * norm.double()
    exact = normed @ (weight.double() * scales.double()[:, None]).T
    for module in (triton, ops):
        y = module.linear_small(x, weight, scales=scales[:, None], code="int8", norm=norm)
        target.check(y, exact)


@pytest.mark.parametrize(
    ("weight", "scales"),
    [
        (torch.ones(3, 4), torch.ones(3, 1)),
        (torch.ones(3, 4, dtype=torch.int8), None),
        (torch.ones(3, 4, dtype=torch.int8), torch.ones(4, 1)),
        (torch.ones(3, 4, dtype=torch.int8), torch.ones(3, 2)),
        (torch.ones(3, 4, dtype=torch.int8), torch.ones(3, 1).int()),
    ],
)
def test_what_does_not_fit_is_refused(weight: torch.Tensor, scales: torch.Tensor | None) -> None:
    with pytest.raises(ValueError, match="kernel linear_small: shapes or dtypes"):
        ops.linear_small(torch.ones(2, 4), weight, scales=scales, code="int8")


def test_tiles_fit() -> None:
    for outputs, inputs in [(6144, 4096), (28672, 4096), (4096, 14336), (1024, 2048)]:
        for tokens in range(1, SMALL_TOKENS + 1):
            tiles = tiles_for(outputs, inputs, tokens, 1)
            bucket = max(16, 1 << (tokens - 1).bit_length()) if tokens > 2 else tokens
            staged = (tiles.rows + 2 * bucket) * tiles.depth * tiles.stages
            assert staged <= 163 << 10
            assert tiles.rows >= (64 if tokens > 2 else 4)
            assert tiles_for(outputs, inputs, 3, 1) == tiles_for(outputs, inputs, 16, 1)


def launched(tokens: int, outputs: int, inputs: int, **options: Any) -> Any:
    with recorded() as launches:
        triton.linear_small(
            torch.empty(tokens, inputs, dtype=torch.bfloat16, device="meta"),
            torch.empty(outputs, inputs, dtype=torch.int8, device="meta"),
            scales=torch.empty(outputs, 1, device="meta"),
            code="int8",
            **options,
        )
    (launch,) = launches
    return launch


@pytest.mark.parametrize(
    ("capability", "tokens", "gated"), [(80, 1, True), (90, 1, False), (90, 2, True)]
)
def test_gemv_compiled(capability: int, tokens: int, gated: bool) -> None:
    norm = torch.empty(4096, dtype=torch.bfloat16, device="meta")
    activation = "silu" if gated else None
    launch = launched(tokens, 28672, 4096, norm=norm, activation=activation)
    assert launch.name == "gemv"
    code = launch.compile(capability)
    assert code.spills == 0
    assert code.fits
    assert code.count("LDGSTS.E.BYPASS.128") == code.count("LDGSTS") > 0


@pytest.mark.parametrize(
    ("capability", "tokens", "outputs", "inputs", "activation"),
    [(80, 3, 6144, 4096, None), (90, 16, 4096, 14336, None), (90, 64, 28672, 4096, "silu")],
)
def test_skinny_gemm_compiled(
    capability: int, tokens: int, outputs: int, inputs: int, activation: str | None
) -> None:
    arrivals = torch.empty(-(-outputs // 64), dtype=torch.int32, device="meta")
    launch = launched(tokens, outputs, inputs, activation=activation, arrivals=arrivals)
    assert launch.name == "skinny_gemm"
    code = launch.compile(capability)
    assert code.spills == 0
    assert code.fits
    instruction = "HGMMA.64x" if capability == 90 else "HMMA.16816.F32.BF16"
    assert code.count(instruction) >= 4
    # The weight, converted in registers, goes there in a layout with 8 bytes a lane on the H100.
    narrow = code.count("LDGSTS.E.64") if capability == 90 else 0
    assert code.count("LDGSTS.E.BYPASS.128") + narrow == code.count("LDGSTS") >= 8
