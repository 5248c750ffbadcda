"""The gates of feed-forward layers against float64, and as machine code."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from kernels.compiled import recorded
from kernels.targets import Target

from asyncinfer.kernels import ops, triton

SHAPES = [(0, 8), (1, 2), (1, 66), (3, 514), (2, 4100)]


def silu(x: torch.Tensor) -> torch.Tensor:
    return x / (1 + (-x).exp())


def gelu(x: torch.Tensor) -> torch.Tensor:
    return x / 2 * (1 + (x / 2**0.5).erf())


def gelu_tanh(x: torch.Tensor) -> torch.Tensor:
    return x / 2 * (1 + ((2 / torch.pi) ** 0.5 * (x + 0.044715 * x**3)).tanh())


Gate = Callable[[torch.Tensor], torch.Tensor]
GATES: list[tuple[str, dict[str, str], Gate]] = [
    ("silu_mul", {}, silu),
    ("gelu_mul", {}, gelu),
    ("gelu_mul", {"approximate": "tanh"}, gelu_tanh),
]


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize(("name", "options", "gate"), GATES)
def test_gates(
    target: Target, shape: tuple[int, int], name: str, options: dict[str, str], gate: Gate
) -> None:
    packed = target.randn(*shape) * 3
    gates, ups = packed.double().chunk(2, -1)
    for module in (triton, ops):
        y = getattr(module, name)(packed, **options)
        assert y.dtype is target.dtype
        target.check(y, gate(gates) * ups)


def test_far_from_zero(target: Target) -> None:
    gates = torch.tensor([-60000.0, -90, -20, 0, 20, 90, 60000]).to(target.device, target.dtype)
    packed = torch.cat((gates, torch.ones_like(gates)))[None]
    for y in (triton.silu_mul(packed), triton.gelu_mul(packed, approximate="tanh")):
        target.check(y[0], gates.double().clamp(min=0))


def test_rows_that_lie_apart(target: Target) -> None:
    wide = target.randn(3, 100)
    gates, ups = wide[:, 3:63].double().chunk(2, -1)
    target.check(triton.silu_mul(wide[:, 3:63]), silu(gates) * ups)


def test_an_unknown_approximation_is_refused() -> None:
    with pytest.raises(ValueError, match="approximate='erf'"):
        ops.gelu_mul(torch.ones(1, 2), approximate="erf")


def test_compiled() -> None:
    packed = torch.empty(3, 28672, dtype=torch.bfloat16, device="meta")
    with recorded() as launches:
        for name, options, _ in GATES:
            getattr(triton, name)(packed, **options)
    for launch in launches:
        assert launch.grid == (3, 14)
        code = launch.compile(90)
        assert code.spills == 0
        assert code.fits
        assert (code.count("LDG.E.128"), code.count("STG.E.128")) == (2, 1)
