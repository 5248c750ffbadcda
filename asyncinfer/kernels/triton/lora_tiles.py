"""Low-rank adapters of many rows: each program computes for a tile of neighbouring rows, one
adapter after the other. Neighbours mostly have the same adapter, since they are tokens of one
prompt."""

from __future__ import annotations

import triton.language as tl

from asyncinfer.kernels.triton.launched import launched
from asyncinfer.kernels.triton.lora_rows import part_of_block

__all__ = ["lora_down_tiles", "lora_up_tiles"]


@launched(do_not_specialize=("rows",), do_not_specialize_on_alignment=("slots",))
def lora_down_tiles(
    x,
    down,
    ranks,
    slots,
    inner,
    rows,
    X_STRIDE: tl.constexpr,
    INPUTS: tl.constexpr,
    RANKS: tl.constexpr,
    PARTS: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_R: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    """`BLOCK_R` rows of `down` times `BLOCK_M` rows of `x`, stored in float32 `inner`. Grid
    `(tiles, blocks)`."""
    m = tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M)
    at = tl.program_id(1) * BLOCK_R + tl.arange(0, BLOCK_R)
    columns = tl.arange(0, BLOCK_K)
    left = tl.load(slots + m, mask=m < rows, other=-1)
    x += m.to(tl.int64)[:, None] * X_STRIDE + columns[None, :]
    inner += m.to(tl.int64)[:, None] * RANKS + at[None, :]
    slot = tl.max(left, axis=0)
    while slot >= 0:
        same = left == slot
        there = at < tl.load(ranks + slot) * PARTS
        places = down + slot.to(tl.int64) * (RANKS * INPUTS)
        places += at.to(tl.int64)[None, :] * INPUTS + columns[:, None]
        total = tl.zeros((BLOCK_M, BLOCK_R), tl.float32)
        for start in tl.range(0, INPUTS, BLOCK_K):
            inside = start + columns < INPUTS
            numbers = tl.load(x + start, mask=same[:, None] & inside[None, :], other=0.0)
            tile = tl.load(places + start, mask=inside[:, None] & there[None, :], other=0.0)
            total = tl.dot(numbers, tile, total, input_precision="ieee")
        tl.store(inner, total, mask=same[:, None] & there[None, :])
        left = tl.where(same, -1, left)
        slot = tl.max(left, axis=0)


@launched(do_not_specialize=("rows",), do_not_specialize_on_alignment=("slots",))
def lora_up_tiles(
    inner,
    up,
    ranks,
    slots,
    y,
    rows,
    Y_STRIDE: tl.constexpr,
    OUTPUTS: tl.constexpr,
    RANK: tl.constexpr,
    PARTS: tl.constexpr,
    FIRST: tl.constexpr,
    SECOND: tl.constexpr,
    THIRD: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_R: tl.constexpr,
):
    """Add to `BLOCK_M` rows of `y` the products of rows of `inner` with `up`, for `BLOCK_N` outputs
    of one projection. Grid `(tiles, blocks)`."""
    m = tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M)
    part, first, size = part_of_block(tl.program_id(1), FIRST, SECOND, THIRD, BLOCK_N)
    at = tl.arange(0, BLOCK_N)
    there = at < size
    left = tl.load(slots + m, mask=m < rows, other=-1)
    inner += m.to(tl.int64)[:, None] * (RANK * PARTS) + part
    y += m.to(tl.int64)[:, None] * Y_STRIDE + first + at[None, :]
    slot = tl.max(left, axis=0)
    while slot >= 0:
        same = left == slot
        rank = tl.load(ranks + slot)
        whole = same[:, None] & there[None, :] & (rank > 0)
        total = tl.load(y, mask=whole, other=0.0).to(tl.float32)
        for start in tl.range(0, rank, BLOCK_R):
            j = start + tl.arange(0, BLOCK_R)
            known = j < rank
            numbers = tl.load(
                inner + j[None, :] * PARTS, mask=same[:, None] & known[None, :], other=0.0
            )
            places = up + slot.to(tl.int64) * (RANK * OUTPUTS) + first
            places += j.to(tl.int64)[:, None] * OUTPUTS + at[None, :]
            tile = tl.load(places, mask=known[:, None] & there[None, :], other=0.0)
            total = tl.dot(numbers, tile.to(tl.float32), total, input_precision="tf32x3")
        tl.store(y, total.to(y.dtype.element_ty), mask=whole)
        left = tl.where(same, -1, left)
        slot = tl.max(left, axis=0)
