"""The inputs of a decode step: the Triton kernel against plain Python, and as machine code."""

from __future__ import annotations

import pytest
import torch
from kernels.compiled import compiled_for, recorded
from kernels.targets import Target

from asyncinfer.kernels import ops, triton
from asyncinfer.kernels.reference.decode_inputs import decode_inputs

SLOTS, CAPACITY, SIZE, WORDS = 6, 50, 8, 6


@pytest.mark.parametrize("width", [7, 1500])
@pytest.mark.parametrize("groups", [1, 2, 3])
@pytest.mark.parametrize("rows", [[3], [5, 0, 3], [1, 4, SLOTS, SLOTS, SLOTS], [SLOTS]])
def test_decode_inputs(target: Target, rows: list[int], groups: int, width: int) -> None:
    generator = torch.Generator().manual_seed(1)
    starts = [0, 7, 8, 31, 48, 40, -1]
    positions = torch.tensor(starts, dtype=torch.int32, device=target.device)
    tables, history, options = (
        torch.randint(low, 99, shape, generator=generator, dtype=torch.int32)
        for low, shape in (
            (0, (SLOTS + 1, groups, width)),
            (0, (SLOTS + 1, CAPACITY)),
            (-99, (SLOTS + 1, WORDS)),
        )
    )
    arguments = torch.tensor(rows, dtype=torch.int32, device=target.device), positions
    there = [tensor.to(target.device) for tensor in (tables, options, history)]
    for kernel in (decode_inputs, triton.decode_inputs, ops.decode_inputs):
        positions.copy_(torch.tensor(starts))
        got = kernel(*arguments, *there, SIZE)
        at = [max(starts[row], 0) for row in rows]
        assert got.positions.tolist() == at
        assert got.tokens.tolist() == [int(history[r, p]) for r, p in zip(rows, at, strict=True)]
        assert got.draw_positions.tolist() == [p + 1 for p in at]
        places = [row * CAPACITY + p + 1 for row, p in zip(rows, at, strict=True)]
        assert got.draw_places.tolist() == places
        assert got.options.tolist() == options[rows, :-2].t().tolist()
        assert (
            got.seeds.tolist()
            == options[rows, -2:].contiguous().view(torch.int64).flatten().tolist()
        )
        assert got.seq_lens.tolist() == [starts[row] + 1 for row in rows]
        for group in range(groups):
            group_tables = tables[:, group]
            assert torch.equal(got.block_tables[group].cpu(), group_tables[rows])
            assert got.slot_mapping[group].tolist() == [
                int(group_tables[row, p // SIZE]) * SIZE + p % SIZE if starts[row] >= 0 else -1
                for row, p in zip(rows, at, strict=True)
            ]
        after = [p + 1 if slot in rows and p >= 0 else p for slot, p in enumerate(starts)]
        assert positions.tolist() == after
        dtypes = [tensor.dtype for tensor in got]
        assert dtypes == [torch.int64] * 5 + [torch.int32] * 3 + [torch.int64]


def test_grid() -> None:
    def meta(*shape: int) -> torch.Tensor:
        return torch.empty(shape, dtype=torch.int32, device="meta")

    with recorded() as launches:
        triton.decode_inputs(
            meta(64), meta(65), meta(65, 1, 8192), meta(65, WORDS), meta(65, 131_073), 16
        )
    (launch,) = launches
    assert launch.grid == (64, 1, 8)


def test_one_code_however_much_memory_was_free() -> None:
    """How long sequences and tables may be differs from open to open."""

    def meta(*shape: int) -> torch.Tensor:
        return torch.empty(shape, dtype=torch.int32, device="meta")

    with recorded() as launches:
        for rows, capacity, width in ((1, 1, 1), (16, 4096, 256), (7, 131_073, 8193)):
            tables, options = meta(257, 2, width), meta(257, 8)
            triton.decode_inputs(meta(rows), meta(257), tables, options, meta(257, capacity), 16)
    first, *others = (compiled_for(launch) for launch in launches)
    assert all(other == first for other in others)
