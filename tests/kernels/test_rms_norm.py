"""RMSNorm's Triton kernel against float64, and as machine code."""

from __future__ import annotations

import pytest
import torch
from kernels.compiled import recorded
from kernels.targets import Target

from asyncinfer.kernels import ops, triton

SHAPES = [(0, 64), (1, 1), (1, 100), (3, 96), (5, 257), (2, 4096)]


def exact(x: torch.Tensor, weight: torch.Tensor, eps: float, plus_one: bool) -> torch.Tensor:
    x, weight = x.double(), weight.double()
    return x / (x.pow(2).mean(-1, keepdim=True) + eps).sqrt() * (weight + plus_one)


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("plus_one", [False, True])
def test_rms_norm(target: Target, shape: tuple[int, int], plus_one: bool) -> None:
    x = target.randn(*shape)
    weight = target.randn(shape[1])
    for kernel in (triton.rms_norm, ops.rms_norm):
        y = kernel(x, weight, 1e-5, plus_one=plus_one)
        assert y.dtype is target.dtype
        target.check(y, exact(x, weight, 1e-5, plus_one))


def test_rms_norm_of_rows_that_lie_apart(target: Target) -> None:
    wide = target.randn(3, 80)
    weight = target.randn(33)
    for x in (wide[:, 7:40], wide.t()[:33, :2].t(), wide[:, :66].view(3, 2, 33)):
        target.check(triton.rms_norm(x, weight, 1e-6), exact(x, weight, 1e-6, False))


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("plus_one", [False, True])
def test_add_rms_norm(target: Target, shape: tuple[int, int], plus_one: bool) -> None:
    x, residual = target.randn(*shape), target.randn(shape[0], 2 * shape[1])[:, 1::2]
    weight = target.randn(shape[1])
    for kernel in (triton.add_rms_norm, ops.add_rms_norm):
        total, y = kernel(x, residual, weight, 1e-5, plus_one=plus_one)
        # It is rounded once, and what is normalised is what was rounded.
        assert torch.equal(total, x + residual)
        assert y.dtype is target.dtype
        target.check(y, exact(x + residual, weight, 1e-5, plus_one))


@pytest.mark.parametrize(("capability", "size"), [(80, 1024), (90, 5120), (90, 16384)])
def test_compiled(capability: int, size: int) -> None:
    x = torch.empty(3, size, dtype=torch.bfloat16, device="meta")
    with recorded() as launches:
        triton.rms_norm(x, x[0], 1e-5)
    (launch,) = launches
    assert launch.grid == (3,)
    code = launch.compile(capability)
    assert code.spills == 0
    assert code.fits
    assert code.count("LDG.E.128") >= 2
    assert code.count("STG.E.128") >= 1
