"""Matrix times few vectors (GEMV): the weight is read once and multiplied in float32.

Tensor cores are not used, since few vectors would not fill their instructions. A program computes
the outputs of a few rows of the weight, over all inputs. Its loads run `num_stages` ahead through
shared memory, which keeps the memory busy. Partial sums stay in the threads' registers until the
end. The result does not depend on the order in which programs run.
"""

from __future__ import annotations

import triton
import triton.language as tl

from asyncinfer.kernels.triton.gate import gate
from asyncinfer.kernels.triton.launched import launched
from asyncinfer.kernels.triton.weight_tile import row_factors, tile_pointers, weight_tile

__all__ = ["gemv", "gemv_block"]


@launched()
def gemv(
    x, weight, scales, offsets, bias, residual, norm, out, eps,
    X_STRIDE: tl.constexpr, RESIDUAL_STRIDE: tl.constexpr, TOKENS: tl.constexpr,
    OUTPUTS: tl.constexpr, INPUTS: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
    GROUP: tl.constexpr, CODE: tl.constexpr, STAGES: tl.constexpr, ACTIVATION: tl.constexpr,
    PLUS_ONE: tl.constexpr,
):  # fmt: skip
    """`gemv_block` for each block of the weight's rows. Grid `(blocks,)`."""
    gemv_block(
        tl.program_id(0), x, weight, scales, offsets, bias, residual, norm, out, eps,
        X_STRIDE=X_STRIDE, RESIDUAL_STRIDE=RESIDUAL_STRIDE, TOKENS=TOKENS, OUTPUTS=OUTPUTS,
        INPUTS=INPUTS, BLOCK_N=BLOCK_N, BLOCK_K=BLOCK_K, GROUP=GROUP, CODE=CODE, STAGES=STAGES,
        ACTIVATION=ACTIVATION, PLUS_ONE=PLUS_ONE,
    )  # fmt: skip


@triton.jit
def gemv_block(
    block, x, weight, scales, offsets, bias, residual, norm, out, eps,
    X_STRIDE: tl.constexpr, RESIDUAL_STRIDE: tl.constexpr, TOKENS: tl.constexpr,
    OUTPUTS: tl.constexpr, INPUTS: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
    GROUP: tl.constexpr, CODE: tl.constexpr, STAGES: tl.constexpr, ACTIVATION: tl.constexpr,
    PLUS_ONE: tl.constexpr,
):  # fmt: skip
    """`linear_small` of `TOKENS` (1 to 4) rows of `x` and the rows of the weight that `weight_rows`
    gives to `block`.

    With a `CODE` the weight is quantised: `scales` and `offsets` are those of each `GROUP` of a
    row's inputs. With `GROUP` 0 each row has one scale, by which the row's sum is multiplied.
    """
    columns = tl.arange(0, BLOCK_K)
    rows = weight_rows(block, OUTPUTS, BLOCK_N, ACTIVATION)
    weight = tile_pointers(weight, rows, INPUTS, BLOCK_K)
    sum0 = tl.zeros((BLOCK_N, BLOCK_K), tl.float32)
    sum1, sum2, sum3 = sum0, sum0, sum0
    square0 = tl.zeros((BLOCK_K,), tl.float32)
    square1, square2, square3 = square0, square0, square0
    for start in tl.range(0, INPUTS, BLOCK_K, num_stages=STAGES):
        if INPUTS % BLOCK_K == 0:
            inside = tl.full((BLOCK_K,), True, tl.int1)
        else:
            inside = start + columns < INPUTS
        tile = weight_tile(
            weight, scales, offsets, rows, start, INPUTS, BLOCK_N, BLOCK_K, GROUP, CODE
        ).to(tl.float32)
        factors = tl.full((BLOCK_K,), 1.0, tl.float32)
        if norm is not None:
            factors = tl.load(norm + start + columns, mask=inside, other=0.0).to(tl.float32)
            if PLUS_ONE:
                factors += 1.0
        at = x + start + columns
        x0 = tl.load(at, mask=inside, other=0.0).to(tl.float32)
        sum0 += tile * (x0 * factors)[None, :]
        square0 += x0 * x0
        if TOKENS > 1:
            x1 = tl.load(at + X_STRIDE, mask=inside, other=0.0).to(tl.float32)
            sum1 += tile * (x1 * factors)[None, :]
            square1 += x1 * x1
        if TOKENS > 2:
            x2 = tl.load(at + 2 * X_STRIDE, mask=inside, other=0.0).to(tl.float32)
            sum2 += tile * (x2 * factors)[None, :]
            square2 += x2 * x2
        if TOKENS > 3:
            x3 = tl.load(at + 3 * X_STRIDE, mask=inside, other=0.0).to(tl.float32)
            sum3 += tile * (x3 * factors)[None, :]
            square3 += x3 * x3
    SIZE: tl.constexpr = OUTPUTS if ACTIVATION is None else OUTPUTS // 2
    BLOCK: tl.constexpr = BLOCK_N if ACTIVATION is None else BLOCK_N // 2
    results = block * BLOCK + tl.arange(0, BLOCK)
    there = results < SIZE
    for token in tl.static_range(TOKENS):
        if token == 0:
            products, square = sum0, square0
        elif token == 1:
            products, square = sum1, square1
        elif token == 2:
            products, square = sum2, square2
        else:
            products, square = sum3, square3
        y = tl.sum(products, axis=1)
        if norm is not None:
            y *= tl.rsqrt(tl.sum(square, axis=0) / INPUTS + eps)
        if CODE is not None and GROUP == 0:
            y *= row_factors(scales, rows, CODE)
        if bias is not None:
            y += tl.load(bias + rows).to(tl.float32)
        if ACTIVATION is not None:
            gates, ups = tl.split(tl.trans(tl.reshape(y, (2, BLOCK))))
            y = gate(gates, ACTIVATION) * ups
        if residual is not None:
            y += tl.load(residual + token * RESIDUAL_STRIDE + results, mask=there).to(tl.float32)
        tl.store(out + token * SIZE + results, y.to(out.dtype.element_ty), mask=there)


@triton.jit
def weight_rows(program, OUTPUTS: tl.constexpr, BLOCK_N: tl.constexpr, ACTIVATION: tl.constexpr):
    """int32 `[BLOCK_N]`: the program's rows of the weight. A row beyond the end is the last one.
    With an `ACTIVATION` the first half are rows of the gate, and the second half those of the up
    part for the same outputs."""
    at = tl.arange(0, BLOCK_N)
    if ACTIVATION is None:
        return tl.minimum(program * BLOCK_N + at, OUTPUTS - 1)
    SIZE: tl.constexpr = OUTPUTS // 2
    BLOCK: tl.constexpr = BLOCK_N // 2
    return tl.minimum(program * BLOCK + at % BLOCK, SIZE - 1) + at // BLOCK * SIZE
