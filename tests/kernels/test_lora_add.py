"""Adapters of many rows against float64, and as machine code."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from kernels.compiled import Launch, recorded
from kernels.targets import Target

from asyncinfer.kernels import ops, triton

#: Slots of the rows: one; none at all; a decode batch; a prompt among decode rows; several in one
#: tile.
SLOTS = [
    [0],
    [-1, -1],
    [2, 0, -1, 1, 2, 3],
    [1] * 70,
    [0, 3, -1] + [2] * 40 + [1] * 37,
]
#: Ranks of the four slots: mixed, a slot that leaves the layer as it is, the most.
RANKS = [3, 20, 0, 1]
#: Outputs of the projections, and inputs.
SHAPES = [((5,), 7), ((130, 64), 300), ((96, 33, 33), 64)]


def exact(
    y: torch.Tensor,
    x: torch.Tensor,
    down: torch.Tensor,
    up: torch.Tensor,
    slots: list[int],
    sizes: tuple[int, ...],
) -> torch.Tensor:
    whole = y.double().clone()
    for row, slot in enumerate(slots):
        start = 0
        for part, size in enumerate(sizes if slot >= 0 else ()):
            rank = RANKS[slot]
            first = down[slot, part :: len(sizes)][:rank].double()
            second = up[slot, :rank, start : start + size].double()
            whole[row, start : start + size] += (first @ x[row].double()) @ second
            start += size
    return whole


@pytest.mark.parametrize("slots", SLOTS, ids=lambda slots: f"{len(slots)}-rows")
@pytest.mark.parametrize(("sizes", "inputs"), SHAPES, ids=str)
def test_each_row_has_its_own_adapter(
    target: Target, slots: list[int], sizes: tuple[int, ...], inputs: int
) -> None:
    rank, outputs = max(RANKS), sum(sizes)
    down = target.randn(len(RANKS), rank * len(sizes), inputs) * inputs**-0.5
    up = target.randn(len(RANKS), rank, outputs) * rank**-0.5
    for slot, own in enumerate(RANKS):
        # What is beyond a slot's rank may hold anything.
        down[slot, own * len(sizes) :] = float("nan")
        up[slot, own:] = float("nan")
    x, y = target.randn(len(slots), inputs), target.randn(len(slots), outputs)
    ranks = torch.tensor(RANKS, dtype=torch.int32, device=target.device)
    there = torch.tensor(slots, dtype=torch.int32, device=target.device)
    whole = exact(y, x, down, up, slots, sizes)
    for module in (triton, ops):
        result = y.clone()
        assert module.lora_add(result, x, down, up, ranks, there, sizes=sizes) is result
        target.check(result, whole)


def test_rows_that_lie_apart(target: Target) -> None:
    x, y = target.randn(3, 100)[:, 5:69], target.randn(3, 50)[:, 1:33]
    down, up = target.randn(1, 4, 64) / 8, target.randn(1, 4, 32) / 2
    ranks = torch.tensor([4], dtype=torch.int32, device=target.device)
    slots = torch.zeros(3, dtype=torch.int32, device=target.device)
    whole = y.double() + x.double() @ down[0].double().t() @ up[0].double()
    triton.lora_add(y, x, down, up, ranks, slots, sizes=(32,))
    target.check(y, whole)


def test_no_rows(target: Target) -> None:
    down, up = target.randn(1, 4, 8), target.randn(1, 4, 6)
    none = torch.zeros(0, dtype=torch.int32, device=target.device)
    ranks = torch.tensor([4], dtype=torch.int32, device=target.device)
    for module in (triton, ops):
        y = target.randn(0, 6)
        assert module.lora_add(y, target.randn(0, 8), down, up, ranks, none, sizes=(6,)) is y


def _refused(**changes: torch.Tensor) -> Callable[[], object]:
    given = {
        "y": torch.ones(2, 6),
        "x": torch.ones(2, 8),
        "down": torch.ones(1, 4, 8),
        "up": torch.ones(1, 4, 6),
        "ranks": torch.ones(1, dtype=torch.int32),
        "slots": torch.zeros(2, dtype=torch.int32),
        **changes,
    }
    return lambda: ops.lora_add(*given.values(), sizes=(6,))


@pytest.mark.parametrize(
    "call",
    [
        _refused(y=torch.ones(3, 6)),
        _refused(x=torch.ones(2, 9)),
        _refused(x=torch.ones(2, 8).half()),
        _refused(down=torch.ones(1, 5, 8)),
        _refused(up=torch.ones(1, 4, 7)),
        _refused(ranks=torch.ones(2, dtype=torch.int32)),
        _refused(slots=torch.zeros(2, dtype=torch.int64)),
    ],
)
def test_what_does_not_fit_is_refused(call: Callable[[], object]) -> None:
    with pytest.raises(ValueError, match="kernel lora_add: shapes or dtypes"):
        call()


def launches(rows: int) -> list[Launch]:
    """Query, key and value of Llama-3.1-8B, with sixteen slots of rank 64."""

    def empty(*shape: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
        return torch.empty(shape, dtype=dtype, device="meta")

    with recorded() as seen:
        triton.lora_add(
            empty(rows, 6144),
            empty(rows, 4096),
            empty(16, 3 * 64, 4096),
            empty(16, 64, 6144),
            empty(16, dtype=torch.int32),
            empty(rows, dtype=torch.int32),
            sizes=(4096, 1024, 1024),
        )
    return seen


@pytest.mark.parametrize(
    ("rows", "names"),
    [(16, ("lora_down_rows", "lora_up_rows")), (2048, ("lora_down_tiles", "lora_up_tiles"))],
)
def test_kernels_for_few_tokens_and_for_many(rows: int, names: tuple[str, str]) -> None:
    assert tuple(launch.name for launch in launches(rows)) == names
