"""Low-rank adapters of a few rows: each program computes for one row, with the row's adapter."""

from __future__ import annotations

import triton
import triton.language as tl

from asyncinfer.kernels.triton.launched import launched

__all__ = ["lora_down_rows", "lora_up_rows", "part_of_block"]


@launched(do_not_specialize_on_alignment=("slots",))
def lora_down_rows(
    x,
    down,
    ranks,
    slots,
    inner,
    X_STRIDE: tl.constexpr,
    INPUTS: tl.constexpr,
    RANKS: tl.constexpr,
    PARTS: tl.constexpr,
    BLOCK_R: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    """`BLOCK_R` rows of `down` times one row of `x`, stored in float32 `inner`. Grid `(rows,
    blocks)`. Nothing is stored beyond the rank of the slot's adapter."""
    row = tl.program_id(0)
    slot = tl.load(slots + row)
    if slot < 0:
        return
    count = tl.load(ranks + slot) * PARTS
    first = tl.program_id(1) * BLOCK_R
    if first >= count:
        return
    at = first + tl.arange(0, BLOCK_R)
    there = at < count
    columns = tl.arange(0, BLOCK_K)
    down += slot.to(tl.int64) * (RANKS * INPUTS)
    places = down + at.to(tl.int64)[:, None] * INPUTS + columns[None, :]
    x += row.to(tl.int64) * X_STRIDE
    total = tl.zeros((BLOCK_R, BLOCK_K), tl.float32)
    for start in tl.range(0, INPUTS, BLOCK_K):
        inside = start + columns < INPUTS
        tile = tl.load(places + start, mask=there[:, None] & inside[None, :], other=0.0)
        numbers = tl.load(x + start + columns, mask=inside, other=0.0).to(tl.float32)
        total += tile.to(tl.float32) * numbers[None, :]
    tl.store(inner + row.to(tl.int64) * RANKS + at, tl.sum(total, axis=1), mask=there)


@launched(do_not_specialize_on_alignment=("slots",))
def lora_up_rows(
    inner,
    up,
    ranks,
    slots,
    y,
    Y_STRIDE: tl.constexpr,
    OUTPUTS: tl.constexpr,
    RANK: tl.constexpr,
    PARTS: tl.constexpr,
    FIRST: tl.constexpr,
    SECOND: tl.constexpr,
    THIRD: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_R: tl.constexpr,
):
    """Add to one row of `y` the products of a row of `inner` with `up`, for `BLOCK_N` outputs of
    one projection. Grid `(rows, blocks)`."""
    row = tl.program_id(0)
    slot = tl.load(slots + row)
    if slot < 0:
        return
    rank = tl.load(ranks + slot)
    if rank == 0:
        return
    part, first, size = part_of_block(tl.program_id(1), FIRST, SECOND, THIRD, BLOCK_N)
    at = tl.arange(0, BLOCK_N)
    there = at < size
    up += slot.to(tl.int64) * (RANK * OUTPUTS) + first
    inner += row.to(tl.int64) * (RANK * PARTS) + part
    total = tl.zeros((BLOCK_R, BLOCK_N), tl.float32)
    for start in tl.range(0, rank, BLOCK_R):
        j = start + tl.arange(0, BLOCK_R)
        known = j < rank
        numbers = tl.load(inner + j * PARTS, mask=known, other=0.0)
        places = up + j.to(tl.int64)[:, None] * OUTPUTS + at[None, :]
        tile = tl.load(places, mask=known[:, None] & there[None, :], other=0.0)
        total += tile.to(tl.float32) * numbers[:, None]
    y += row.to(tl.int64) * Y_STRIDE + first + at
    whole = tl.load(y, mask=there, other=0.0).to(tl.float32) + tl.sum(total, axis=0)
    tl.store(y, whole.to(y.dtype.element_ty), mask=there)


@triton.jit
def part_of_block(
    block,
    FIRST: tl.constexpr,
    SECOND: tl.constexpr,
    THIRD: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    """The projection that a block of outputs belongs to, the block's first output in the layer, and
    how many outputs of the projection there are from that one on. A layer packs up to three
    projections, of `FIRST`, `SECOND` and `THIRD` outputs."""
    ONE: tl.constexpr = (FIRST + BLOCK_N - 1) // BLOCK_N
    TWO: tl.constexpr = (SECOND + BLOCK_N - 1) // BLOCK_N
    part = (block >= ONE).to(tl.int32) + (block >= ONE + TWO).to(tl.int32)
    before = tl.where(part == 0, 0, tl.where(part == 1, ONE, ONE + TWO))
    start = tl.where(part == 0, 0, tl.where(part == 1, FIRST, FIRST + SECOND))
    whole = tl.where(part == 0, FIRST, tl.where(part == 1, SECOND, THIRD))
    skipped = (block - before) * BLOCK_N
    return part, start + skipped, whole - skipped
