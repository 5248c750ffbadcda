"""Tiles of a quantised weight, decoded from the format in which the weight is stored."""

from __future__ import annotations

import triton
import triton.language as tl

__all__ = ["row_factors", "tile_pointers", "weight_tile"]

#: The values of the code "iq4" as signed bytes, four in a word.
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
    """Pointers to the first `BLOCK_K` inputs of each of the weight's `rows` `[n]`. A uint8 holds
    two inputs."""
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
    """`[BLOCK_N, BLOCK_K]`: inputs `start .. start + BLOCK_K - 1` of the rows that `tile_pointers`
    points to.

    Beyond the last input the tile has any finite numbers, since `x` is 0 there. Without a `CODE`
    numbers are as they are stored. With a `CODE` and a `GROUP` they are float32, with the scale and
    offset of each `GROUP` of inputs. With `GROUP` 0 they lack the factors of `row_factors`.
    """
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
    """float32 `[n]`: the factor of each row's sum, where the row's inputs are a single group."""
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
    """The scales or offsets `values` of a tile's inputs, 0 beyond the last group. float32
    `[BLOCK_N, BLOCK_K]`, or `[BLOCK_N, 1]` where all inputs of the tile are in one group."""
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
    """Scales in float32, times the power of two that the results of `decoded` lack. A uint8 is the
    exponent of a power of two, biased by 127."""
    UNIT: tl.constexpr = 16384.0 if CODE == "e2m1" else (256.0 if CODE == "e4m3" else 1.0)
    if values.dtype == tl.uint8:
        found = (values.to(tl.uint32) << 23).to(tl.float32, bitcast=True)
    else:
        found = values.to(tl.float32)
    return found * UNIT


@triton.jit
def decoded(codes, CODE: tl.constexpr):
    """The float32 numbers that uint8 `codes` stand for, without the power of two of `factors`.

    - "int4": whole numbers from 0 to 15.
    - "e2m1": the floats of MXFP4, with a sign, two bits of exponent and one of mantissa (OCP MX
      specification 1.0, 5.3.3).
    - "iq4": a table of 16 values (IQ4_NL and IQ4_XS of GGUF).
    - "e4m3": floats of 8 bits without NaN, with a sign, four bits of exponent and three of
      mantissa.
    """
    if CODE == "int4":
        numbers = codes.to(tl.float32)
    elif CODE == "e2m1":
        # A float16 with the same sign, exponent and mantissa. The bias of its exponent is larger by
        # 14. Subnormal numbers are exact as well.
        bits = ((codes & 7).to(tl.uint16) << 9) | ((codes & 8).to(tl.uint16) << 12)
        numbers = bits.to(tl.float16, bitcast=True).to(tl.float32)
    elif CODE == "e4m3":
        # Likewise a float16, whose bias is larger by 8.
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
