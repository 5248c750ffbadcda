"""Matrix times a few dozen vectors, on the tensor cores (skinny GEMM).

The weight is the first operand, since its rows fill the 64 rows of an instruction. So few tokens
would not. Where the weight has too few rows to occupy every multiprocessor, several programs share
each block of rows, and each takes a stretch of the inputs (split-K). The last of them to arrive
adds up their partial sums, always in the same order.
"""

from __future__ import annotations

import triton.language as tl

from asyncinfer.kernels.triton.gate import gate
from asyncinfer.kernels.triton.gemv import weight_rows
from asyncinfer.kernels.triton.launched import launched
from asyncinfer.kernels.triton.weight_tile import row_factors, tile_pointers, weight_tile

__all__ = ["skinny_gemm"]


@launched(do_not_specialize=["tokens"])
def skinny_gemm(
    x, weight, scales, offsets, bias, residual, out, partials, arrivals, tokens,
    X_STRIDE: tl.constexpr, RESIDUAL_STRIDE: tl.constexpr, OUTPUTS: tl.constexpr,
    INPUTS: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
    GROUP: tl.constexpr, CODE: tl.constexpr, SPLITS: tl.constexpr, STAGES: tl.constexpr,
    ACTIVATION: tl.constexpr,
):  # fmt: skip
    """`linear_small` of `tokens` rows of `x`, at most `BLOCK_M`, and the rows of the weight that
    `weight_rows` gives to a block. Grid `(blocks, SPLITS)`. `GROUP` and `CODE` are as in
    `gemv_block`.
    """
    STRETCH: tl.constexpr = (INPUTS + SPLITS * BLOCK_K - 1) // (SPLITS * BLOCK_K) * BLOCK_K
    block = tl.program_id(0)
    begin = tl.program_id(1) * STRETCH
    columns = tl.arange(0, BLOCK_K)
    token = tl.arange(0, BLOCK_M)
    rows = weight_rows(block, OUTPUTS, BLOCK_N, ACTIVATION)
    weight = tile_pointers(weight, rows, INPUTS, BLOCK_K)
    # Tokens beyond the last one are read as the last. Their sums are not stored.
    x += tl.minimum(token, tokens - 1)[None, :] * X_STRIDE + columns[:, None]
    sums = tl.zeros((BLOCK_N, BLOCK_M), tl.float32)
    for start in tl.range(begin, tl.minimum(begin + STRETCH, INPUTS), BLOCK_K, num_stages=STAGES):
        tile = weight_tile(
            weight, scales, offsets, rows, start, INPUTS, BLOCK_N, BLOCK_K, GROUP, CODE
        )
        if INPUTS % BLOCK_K == 0:
            inputs = tl.load(x + start)
        else:
            inputs = tl.load(x + start, mask=(start + columns < INPUTS)[:, None], other=0.0)
        # Numbers of 8 bits are exact in every dtype of `x`.
        sums = tl.dot(tile.to(inputs.dtype), inputs, sums, input_precision="ieee")

    if SPLITS > 1:
        at = tl.arange(0, BLOCK_N)[:, None] * BLOCK_M + token[None, :]
        partials += block * (SPLITS * BLOCK_N * BLOCK_M) + at
        tl.store(partials + tl.program_id(1) * (BLOCK_N * BLOCK_M), sums)
        # All threads write their parts before the program counts as arrived.
        tl.debug_barrier()
        arrived = tl.atomic_add(arrivals + block, 1, sem="acq_rel", scope="gpu")
        if arrived < SPLITS - 1:
            return
        tl.store(arrivals + block, 0)
        sums = tl.load(partials, cache_modifier=".cg")
        for split in tl.static_range(1, SPLITS):
            sums += tl.load(partials + split * (BLOCK_N * BLOCK_M), cache_modifier=".cg")

    SIZE: tl.constexpr = OUTPUTS if ACTIVATION is None else OUTPUTS // 2
    BLOCK: tl.constexpr = BLOCK_N if ACTIVATION is None else BLOCK_N // 2
    if CODE is not None and GROUP == 0:
        sums *= row_factors(scales, rows, CODE)[:, None]
    if bias is not None:
        sums += tl.load(bias + rows).to(tl.float32)[:, None]
    if ACTIVATION is not None:
        pairs = tl.permute(tl.reshape(sums, (2, BLOCK, BLOCK_M)), (1, 2, 0))
        gates, ups = tl.split(pairs)
        sums = gate(gates, ACTIVATION) * ups
    results = block * BLOCK + tl.arange(0, BLOCK)
    there = (results < SIZE)[:, None] & (token < tokens)[None, :]
    if residual is not None:
        source = residual + token[None, :] * RESIDUAL_STRIDE + results[:, None]
        sums += tl.load(source, mask=there, other=0.0).to(tl.float32)
    target = out + token[None, :] * SIZE + results[:, None]
    tl.store(target, sums.to(out.dtype.element_ty), mask=there)
