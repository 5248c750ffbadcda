"""Rows sorted by expert times the matrices of their experts, on the tensor cores (grouped GEMM).

The rows of each expert are cut into tiles. Only the device knows how many tiles there are, so the
grid has the most that there can be. A program finds its tile's expert in the list of ends. The
weight is the first operand, as in the skinny GEMM, since its rows fill an instruction even where an
expert has a single token.
"""

from __future__ import annotations

import triton.language as tl

from asyncinfer.kernels.triton.launched import launched
from asyncinfer.kernels.triton.weight_tile import row_factors, tile_pointers, weight_tile

__all__ = ["grouped_gemm"]


@launched(do_not_specialize=["tiles"])
def grouped_gemm(
    x, weight, scales, offsets, ends, bias, out, tiles,
    X_STRIDE: tl.constexpr, EXPERTS: tl.constexpr, OUTPUTS: tl.constexpr, INPUTS: tl.constexpr,
    BLOCK_E: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
    TOGETHER: tl.constexpr, GROUP: tl.constexpr, CODE: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """The product of at most `BLOCK_M` rows of `x`, all of one expert, and `BLOCK_N` rows of the
    expert's weight.

    The grid is `tiles * blocks`. It goes through `TOGETHER` tiles with each block of weight rows,
    tile after tile, then through the next tiles, so that neighbouring programs find in the L2 cache
    what they share.
    """
    BLOCKS: tl.constexpr = (OUTPUTS + BLOCK_N - 1) // BLOCK_N
    program = tl.program_id(0)
    first = program // (TOGETHER * BLOCKS) * TOGETHER
    program = program % (TOGETHER * BLOCKS)
    size = tl.minimum(tiles - first, TOGETHER)
    tile = first + program % size
    block = program // size

    experts = tl.arange(0, BLOCK_E)
    there = experts < EXPERTS
    begins = tl.load(ends + experts - 1, mask=there & (experts > 0), other=0)
    stops = tl.load(ends + experts, mask=there, other=0)
    counts = tl.where(there, (stops - begins + BLOCK_M - 1) // BLOCK_M, 0)
    expert = tl.sum((tl.cumsum(counts, axis=0) <= tile).to(tl.int32), axis=0)
    if expert >= EXPERTS:
        return
    tile -= tl.sum(tl.where(experts < expert, counts, 0), axis=0)
    begin = tl.sum(tl.where(experts == expert, begins, 0), axis=0) + tile * BLOCK_M
    stop = tl.sum(tl.where(experts == expert, stops, 0), axis=0)

    columns = tl.arange(0, BLOCK_K)
    tokens = begin + tl.arange(0, BLOCK_M)
    outputs = block * BLOCK_N + tl.arange(0, BLOCK_N)
    rows = tl.minimum(outputs, OUTPUTS - 1)
    HELD: tl.constexpr = 2 if weight.dtype.element_ty == tl.uint8 else 1
    SIZE: tl.constexpr = OUTPUTS * (INPUTS // HELD)
    weight = tile_pointers(weight + expert.to(tl.int64) * SIZE, rows, INPUTS, BLOCK_K)
    GROUPS: tl.constexpr = 1 if GROUP == 0 else INPUTS // GROUP
    if scales is not None:
        scales += expert.to(tl.int64) * (OUTPUTS * GROUPS)
    if offsets is not None:
        offsets += expert.to(tl.int64) * (OUTPUTS * GROUPS)
    # Rows beyond the last one are read as the last. Their sums are not stored.
    x += tl.minimum(tokens, stop - 1).to(tl.int64)[None, :] * X_STRIDE + columns[:, None]
    sums = tl.zeros((BLOCK_N, BLOCK_M), tl.float32)
    for start in tl.range(0, INPUTS, BLOCK_K, num_stages=STAGES):
        part = weight_tile(
            weight, scales, offsets, rows, start, INPUTS, BLOCK_N, BLOCK_K, GROUP, CODE
        )
        if INPUTS % BLOCK_K == 0:
            inputs = tl.load(x + start)
        else:
            inputs = tl.load(x + start, mask=(start + columns < INPUTS)[:, None], other=0)
        # Numbers of 8 bits are exact in every dtype of `x`.
        sums = tl.dot(part.to(inputs.dtype), inputs, sums, input_precision="ieee")

    if CODE is not None and GROUP == 0:
        sums *= row_factors(scales, rows, CODE)[:, None]
    if bias is not None:
        sums += tl.load(bias + expert * OUTPUTS + rows).to(tl.float32)[:, None]
    target = out + tokens.to(tl.int64)[None, :] * OUTPUTS + outputs[:, None]
    kept = (tokens < stop)[None, :] & (outputs < OUTPUTS)[:, None]
    tl.store(target, sums.to(out.dtype.element_ty), mask=kept)
