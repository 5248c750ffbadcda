"""Tiles of a weight in the format that it is stored in, as the numbers that it stands for."""

from __future__ import annotations

import triton
import triton.language as tl

__all__ = ["row_factors", "tile_pointers", "weight_tile"]

#: The values of "iq4", bytes with a sign, four to a word.
_IQ4_0, _IQ4_4, _IQ4_8, _IQ4_12 = (
    tl.constexpr(int.from_bytes(bytes(value & 255 for value in values), "little", signed=True))
    for values in (
        (-127, -104, -83, -65),
        (-49, -35, -22, -10),
        (1, 13, 25, 38),
        (53, 69, 89, 113),
    )
)


@triton.jit
def tile_pointers(weight, rows, INPUTS: tl.constexpr, BLOCK_K: tl.constexpr):
    """To `rows` `[n]` of the weight, the first `BLOCK_K` inputs of each. A uint8 holds two of
    them."""
    HELD: tl.constexpr = 2 if weight.dtype.element_ty == tl.uint8 else 1
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
    last input any finite number, as the inputs are 0 there.

    Without a `CODE` as stored. With one and a `GROUP` float32, by the scale and offset of each
    `GROUP` of inputs; with `GROUP` 0 before the multiplication by `row_factors`."""
    HELD: tl.constexpr = 2 if pointers.dtype.element_ty == tl.uint8 else 1
    at = start // HELD
    if INPUTS % BLOCK_K == 0:
        tile = tl.load(pointers + at)
    else:
        inside = at + tl.arange(0, BLOCK_K // HELD) < INPUTS // HELD
        tile = tl.load(pointers + at, mask=inside[None, :], other=0)
    if HELD == 2:
        tile = tl.interleave(decoded(tile & 15, CODE), decoded(tile >> 4, CODE))
    elif CODE == "e4m3":
        tile = decoded(tile.to(tl.uint8, bitcast=True), CODE)
    if CODE is not None and GROUP != 0:
        GROUPS: tl.constexpr = INPUTS // GROUP
        tile = tile.to(tl.float32)
        tile *= of_groups(scales, rows, start, GROUPS, BLOCK_N, BLOCK_K, GROUP, CODE)
        if offsets is not None:
            tile += of_groups(offsets, rows, start, GROUPS, BLOCK_N, BLOCK_K, GROUP, "int8")
    return tile


@triton.jit
def row_factors(scales, rows, CODE: tl.constexpr):
    """float32, for each row: what its sum is multiplied by where it is a single group."""
    return factors(tl.load(scales + rows), CODE)


@triton.jit
def of_groups(
    values,
    rows,
    start,
    GROUPS: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    GROUP: tl.constexpr,
    CODE: tl.constexpr,
):
    """float32 `[BLOCK_N, BLOCK_K]`, or `[BLOCK_N, 1]` if the inputs are all of one group: what each
    row's groups have, 0 beyond the last group."""
    if GROUP >= BLOCK_K or GROUPS == 1:
        spread = factors(tl.load(values + rows * GROUPS + start // GROUP), CODE)[:, None]
    else:
        PARTS: tl.constexpr = BLOCK_K // GROUP
        group = start // GROUP + tl.arange(0, PARTS)
        at = values + rows[:, None] * GROUPS + group[None, :]
        found = factors(tl.load(at, mask=(group < GROUPS)[None, :], other=0), CODE)
        spread = tl.broadcast_to(found[:, :, None], (BLOCK_N, PARTS, GROUP))
        spread = tl.reshape(spread, (BLOCK_N, BLOCK_K))
    return spread


@triton.jit
def factors(values, CODE: tl.constexpr):
    """float32 scales of what `decoded` gives. A uint8 is a power of two, biased by 127."""
    UNIT: tl.constexpr = 16384.0 if CODE == "e2m1" else (256.0 if CODE == "e4m3" else 1.0)
    if values.dtype == tl.uint8:
        found = (values.to(tl.uint32) << 23).to(tl.float32, bitcast=True)
    else:
        found = values.to(tl.float32)
    return found * UNIT


@triton.jit
def decoded(codes, CODE: tl.constexpr):
    """What codes (uint8) stand for, but for a factor that `factors` knows. Of 4 bits, "int4": 0 to
    15. "e2m1": the floats of MXFP4, a sign, two bits of exponent and one of mantissa (OCP MX
    specification 1.0, 5.3.3). "iq4": a table. Of 8 bits, "e4m3": a sign, four bits of exponent and
    three of mantissa, no NaN."""
    if CODE == "int4":
        numbers = codes.to(tl.float32)
    elif CODE == "e2m1":
        # The bits of a float16 with the same sign, exponent and mantissa. The bias of a float16's
        # exponent is larger by 14. Its subnormal numbers are exact as well.
        bits = ((codes & 7).to(tl.uint16) << 9) | ((codes & 8).to(tl.uint16) << 12)
        numbers = bits.to(tl.float16, bitcast=True).to(tl.float32)
    elif CODE == "e4m3":
        # The same, where the bias is larger by 8.
        bits = ((codes & 127).to(tl.uint16) << 7) | ((codes & 128).to(tl.uint16) << 8)
        numbers = bits.to(tl.float16, bitcast=True).to(tl.float32)
    else:
        tl.static_assert(CODE == "iq4")
        at = codes.to(tl.int32)
        low = tl.where(at < 4, _IQ4_0, _IQ4_4)
        high = tl.where(at < 12, _IQ4_8, _IQ4_12)
        word = tl.where(at < 8, low, high)
        numbers = (word >> ((at & 3) * 8)).to(tl.int8).to(tl.float32)
    return numbers
