"""Grouped products against float64, as machine code, and in the launches that a host prepares."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from kernels.compiled import Launch, recorded
from kernels.targets import Target

from asyncinfer.kernels import ops, triton
from asyncinfer.kernels.linear_tiles import grouped_tiles

#: How many rows each expert has: on both sides of what goes row by row, of a tile and of a wider
#: one; none, all, the first and the last alone; more experts than rows; an odd number of experts.
COUNTS = [
    [1],
    [0, 0, 1],
    [3, 0, 1, 0, 4],
    [0, 0, 9, 0],
    [17, 0, 0],
    [0, 0, 0, 0, 0, 33],
    [5, 16, 0, 1, 17],
    [1] * 20,
    [40, 70],
    [0, 150],
]
#: Each with outputs and inputs that fill no tile; some with one number, and with several tiles.
PRODUCTS = [(counts, 70, 33) for counts in COUNTS] + [
    (counts, *shape)
    for counts in ([1], [3, 0, 1, 0, 4], [5, 16, 0, 1, 17], [0, 150])
    for shape in ((1, 1), (130, 160))
]


def exact(
    x: torch.Tensor,
    weight: torch.Tensor,
    ends: torch.Tensor,
    bias: torch.Tensor | None = None,
    *,
    scales: torch.Tensor | None = None,
    code: str | None = None,
) -> torch.Tensor:
    whole = weight.double() if scales is None else weight.double() * scales.double()
    of = (torch.arange(len(x), device=x.device)[:, None] >= ends[None, :]).sum(1)
    y = torch.stack([whole[expert] @ row for row, expert in zip(x.double(), of, strict=True)])
    return y if bias is None else y + bias.double()[of]


def check(target: Target, *arguments: Any, **options: Any) -> None:
    for module in (triton, ops):
        y = module.grouped_linear(*arguments, **options)
        assert y.dtype is target.dtype
        target.check(y, exact(*arguments, **options))


def ends_of(counts: list[int], device: str) -> torch.Tensor:
    return torch.tensor(counts, device=device).cumsum(0).int()


@pytest.mark.parametrize(("counts", "outputs", "inputs"), PRODUCTS, ids=str)
def test_products(target: Target, counts: list[int], outputs: int, inputs: int) -> None:
    x = target.randn(sum(counts), inputs)
    weight = target.randn(len(counts), outputs, inputs) * inputs**-0.5
    check(target, x, weight, ends_of(counts, target.device))


@pytest.mark.parametrize("counts", [[0, 3, 1], [20, 0, 7], [0, 90]], ids=str)
def test_bias_and_int8(target: Target, counts: list[int]) -> None:
    experts, outputs, inputs = len(counts), 70, 36
    x, ends = target.randn(sum(counts), inputs), ends_of(counts, target.device)
    bias = target.randn(experts, outputs)
    check(target, x, target.randn(experts, outputs, inputs) / 6, ends, bias)
    weight = torch.randint(-127, 128, (experts, outputs, inputs), device=target.device)
    given = {"scales": torch.rand(experts, outputs, 1, device=target.device) / 500, "code": "int8"}
    check(target, x, weight.to(torch.int8), ends, bias, **given)
    check(target, x, weight.to(torch.int8), ends, **given)


@pytest.mark.parametrize("rows", [4, 30])
def test_rows_that_lie_apart(target: Target, rows: int) -> None:
    weight, ends = target.randn(2, 40, 64) / 8, ends_of([1, rows - 1], target.device)
    check(target, target.randn(rows, 200)[:, 3:67], weight, ends)
    check(target, target.randn(64, rows).t(), weight, ends)


def test_no_rows(target: Target) -> None:
    ends = torch.zeros(2, dtype=torch.int32, device=target.device)
    for module in (triton, ops):
        y = module.grouped_linear(target.randn(0, 8), target.randn(2, 6, 8), ends)
        assert y.shape == (0, 6)


@pytest.mark.parametrize("counts", [[9, 0, 0], [3, 3, 3], [0, 8, 1]], ids=str)
def test_a_row_does_not_depend_on_how_the_others_are_shared_out(
    target: Target, counts: list[int]
) -> None:
    """The last row's expert computes the same whoever else comes to it."""
    x, one = target.randn(9, 96), target.randn(50, 96) / 10
    weight = one.expand(3, 50, 96).contiguous()
    alone = triton.grouped_linear(x, weight, ends_of([4, 4, 1], target.device))
    assert torch.equal(alone, triton.grouped_linear(x, weight, ends_of(counts, target.device)))


REFUSED: list[Callable[[], object]] = [
    lambda: ops.grouped_linear(torch.ones(2, 4), torch.ones(3, 5, 6), _ends(3)),
    lambda: ops.grouped_linear(torch.ones(2, 4), torch.ones(3, 5, 4).half(), _ends(3)),
    lambda: ops.grouped_linear(torch.ones(2, 4), torch.ones(3, 5, 4), _ends(2)),
    lambda: ops.grouped_linear(torch.ones(2, 4), torch.ones(3, 5, 4), _ends(3).long()),
    lambda: ops.grouped_linear(torch.ones(2, 4), torch.ones(3, 5, 4), _ends(3), torch.ones(5)),
    lambda: ops.grouped_linear(
        *(torch.ones(2, 4), torch.ones(3, 5, 4).to(torch.int8), _ends(3)),
        scales=torch.ones(5, 1),
        code="int8",
    ),
    lambda: ops.grouped_linear(torch.ones(2, 4), torch.ones(3, 5, 4).to(torch.int8), _ends(3)),
]


def _ends(experts: int) -> torch.Tensor:
    return torch.full((experts,), 2, dtype=torch.int32)


@pytest.mark.parametrize("call", REFUSED)
def test_what_does_not_fit_is_refused(call: Callable[[], object]) -> None:
    with pytest.raises(ValueError, match="kernel grouped_linear: shapes or dtypes"):
        call()


def test_every_tile_has_a_program() -> None:
    """The grid has room for the worst way of sharing rows out, and not for much more."""
    for experts in (1, 3, 8, 128):
        for rows in (9, 16, 17, 64, 1000):
            tokens, tiles = grouped_tiles(rows, experts, 2)
            (launch,) = launches(rows, experts, 64, 32)
            programs = launch.grid[0]
            used = min(experts, rows)
            # One row for every expert in use, and all that are left for the first.
            worst = used - 1 + -(-(rows - used + 1) // tokens)
            assert tiles.rows >= 64
            assert programs >= worst
            assert programs <= used + rows // tokens


def launches(
    rows: int, experts: int, outputs: int, inputs: int, *, int8: bool = False
) -> list[Launch]:
    dtype = torch.int8 if int8 else torch.bfloat16
    with recorded() as seen:
        triton.grouped_linear(
            torch.empty(rows, inputs, dtype=torch.bfloat16, device="meta"),
            torch.empty(experts, outputs, inputs, dtype=dtype, device="meta"),
            torch.empty(experts, dtype=torch.int32, device="meta"),
            scales=torch.empty(experts, outputs, 1, device="meta") if int8 else None,
            code="int8" if int8 else None,
        )
    return seen


@pytest.mark.parametrize(("capability", "int8"), [(80, False), (90, True)])
def test_gemv_compiled(capability: int, int8: bool) -> None:
    """Gate and up of Qwen3-30B-A3B's experts, for one token."""
    (launch,) = launches(8, 128, 1536, 2048, int8=int8)
    assert launch.name == "grouped_gemv"
    code = launch.compile(capability)
    assert code.spills == 0
    assert code.fits
    assert code.count("LDGSTS.E.BYPASS.128") == code.count("LDGSTS") > 0


@pytest.mark.parametrize(
    ("capability", "int8", "rows", "experts", "outputs", "inputs"),
    [
        # One of each kind of tiles: of 16, 64 and 128 tokens.
        (80, False, 16, 128, 1536, 2048),  # two tokens
        (90, True, 16, 128, 1536, 2048),
        (90, False, 512, 8, 4096, 14336),
        (80, True, 512, 8, 4096, 14336),
        (90, False, 16384, 128, 1536, 2048),  # a prompt's chunk of 2,048 tokens
        (90, True, 16384, 128, 1536, 2048),
    ],
)
def test_gemm_compiled(
    capability: int, int8: bool, rows: int, experts: int, outputs: int, inputs: int
) -> None:
    (launch,) = launches(rows, experts, outputs, inputs, int8=int8)
    assert launch.name == "grouped_gemm"
    code = launch.compile(capability)
    assert code.spills == 0
    assert code.fits
    instruction = "HGMMA.64x" if capability == 90 else "HMMA.16816.F32.BF16"
    assert code.count(instruction) >= 4
    # What is converted in registers goes there in a layout with 8 bytes a lane on the H100.
    narrow = code.count("LDGSTS.E.64") if int8 and capability == 90 else 0
    assert code.count("LDGSTS.E.BYPASS.128") + narrow == code.count("LDGSTS")
    assert code.count("LDGSTS.E.BYPASS.128") >= 4
