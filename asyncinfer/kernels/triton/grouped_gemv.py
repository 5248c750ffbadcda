"""A few rows, each times the matrix of its own expert (GEMV by expert)."""

from __future__ import annotations

import triton.language as tl

from asyncinfer.kernels.triton.gemv import gemv_block
from asyncinfer.kernels.triton.launched import launched

__all__ = ["grouped_gemv"]


@launched()
def grouped_gemv(
    x, weight, scales, offsets, ends, bias, out,
    X_STRIDE: tl.constexpr, EXPERTS: tl.constexpr, OUTPUTS: tl.constexpr, INPUTS: tl.constexpr,
    BLOCK_E: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, GROUP: tl.constexpr,
    CODE: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """The product of one row of `x` and `BLOCK_N` rows of its expert's weight. Grid `(rows,
    blocks)`: rows of one expert read the same block at about the same time, and all but the first
    find it in the L2 cache."""
    row = tl.program_id(0)
    experts = tl.arange(0, BLOCK_E)
    stops = tl.load(ends + experts, mask=experts < EXPERTS, other=row + 1)
    # A row beyond the last end takes the last expert, so that no program reads outside the weight.
    expert = tl.minimum(tl.sum((stops <= row).to(tl.int32), axis=0), EXPERTS - 1)
    HELD: tl.constexpr = 2 if weight.dtype.element_ty == tl.uint8 else 1
    SIZE: tl.constexpr = OUTPUTS * (INPUTS // HELD)
    weight += expert.to(tl.int64) * SIZE
    GROUPS: tl.constexpr = 1 if GROUP == 0 else INPUTS // GROUP
    if scales is not None:
        scales += expert.to(tl.int64) * (OUTPUTS * GROUPS)
    if offsets is not None:
        offsets += expert.to(tl.int64) * (OUTPUTS * GROUPS)
    if bias is not None:
        bias += expert * OUTPUTS
    gemv_block(
        tl.program_id(1), x + row.to(tl.int64) * X_STRIDE, weight, scales, offsets, bias, None,
        None, out + row.to(tl.int64) * OUTPUTS, 0.0, X_STRIDE=X_STRIDE, RESIDUAL_STRIDE=0,
        TOKENS=1, OUTPUTS=OUTPUTS, INPUTS=INPUTS, BLOCK_N=BLOCK_N, BLOCK_K=BLOCK_K, GROUP=GROUP,
        CODE=CODE, STAGES=STAGES, ACTIVATION=None, PLUS_ONE=False,
    )  # fmt: skip
