"""Tiles of a weight in the format that it is stored in, as the numbers that it stands for."""

from __future__ import annotations

import triton
import triton.language as tl

__all__ = ["tile_pointers", "weight_tile"]


@triton.jit
def tile_pointers(weight, rows, INPUTS: tl.constexpr, BLOCK_K: tl.constexpr, CODE: tl.constexpr):
    """To `rows` `[n]` of the weight, the first `BLOCK_K` inputs of each. With a `CODE` a byte holds
    two of them."""
    HELD: tl.constexpr = 1 if CODE is None else 2
    columns = tl.arange(0, BLOCK_K // HELD)
    return weight + rows.to(tl.int64)[:, None] * (INPUTS // HELD) + columns[None, :]


@triton.jit
def weight_tile(
    pointers,
    scales,
    offsets,
    rows,
    start,
    INPUTS: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    GROUP: tl.constexpr,
    CODE: tl.constexpr,
):
    """Inputs `start .. start + BLOCK_K - 1` of the rows that `tile_pointers` points to; beyond the
    last input any finite number, as the inputs are 0 there. Without a `CODE` as stored; with one
    float32, by the scales and offsets of each `GROUP` of inputs."""
    HELD: tl.constexpr = 1 if CODE is None else 2
    at = start // HELD
    if INPUTS % BLOCK_K == 0:
        tile = tl.load(pointers + at)
    else:
        inside = at + tl.arange(0, BLOCK_K // HELD) < INPUTS // HELD
        tile = tl.load(pointers + at, mask=inside[None, :], other=0)
    if CODE is not None:
        tile = tl.interleave(decoded(tile & 15, CODE), decoded(tile >> 4, CODE))
        GROUPS: tl.constexpr = INPUTS // GROUP
        tile *= of_groups(scales, rows, start, GROUPS, BLOCK_N, BLOCK_K, GROUP)
        if offsets is not None:
            tile += of_groups(offsets, rows, start, GROUPS, BLOCK_N, BLOCK_K, GROUP)
    return tile


@triton.jit
def of_groups(
    values,
    rows,
    start,
    GROUPS: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    GROUP: tl.constexpr,
):
    """float32 `[BLOCK_N, BLOCK_K]`, or `[BLOCK_N, 1]` if the inputs are all of one group: what each
    row's groups have, 0 beyond the last group."""
    if GROUP >= BLOCK_K or GROUPS == 1:
        spread = tl.load(values + rows * GROUPS + start // GROUP).to(tl.float32)[:, None]
    else:
        PARTS: tl.constexpr = BLOCK_K // GROUP
        group = start // GROUP + tl.arange(0, PARTS)
        at = values + rows[:, None] * GROUPS + group[None, :]
        found = tl.load(at, mask=(group < GROUPS)[None, :], other=0.0).to(tl.float32)
        spread = tl.broadcast_to(found[:, :, None], (BLOCK_N, PARTS, GROUP))
        spread = tl.reshape(spread, (BLOCK_N, BLOCK_K))
    return spread


@triton.jit
def decoded(codes, CODE: tl.constexpr):
    """float32: what codes of 4 bits (uint8) stand for. "int4": 0 to 15. "e2m1": the floats of
    MXFP4, a sign, two bits of exponent and one of mantissa (OCP MX specification 1.0, 5.3.3)."""
    tl.static_assert(CODE == "int4" or CODE == "e2m1")
    if CODE == "int4":
        numbers = codes.to(tl.float32)
    else:
        # The bits of a float16 with the same sign, exponent and mantissa. The bias of a float16's
        # exponent is larger by 14. Its subnormal numbers are exact as well.
        bits = ((codes & 7).to(tl.uint16) << 9) | ((codes & 8).to(tl.uint16) << 12)
        numbers = bits.to(tl.float16, bitcast=True).to(tl.float32) * 16384.0
    return numbers
