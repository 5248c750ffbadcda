"""The residual stream's sum and its normalisation in one pass over a token's row."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from asyncinfer.kernels.triton.rms_norm import normalised_row, row_warps

__all__ = ["add_rms_norm"]


def add_rms_norm(
    x: torch.Tensor,
    residual: torch.Tensor,
    weight: torch.Tensor,
    eps: float,
    *,
    plus_one: bool = False,
) -> tuple[torch.Tensor, torch.Tensor]:
    """As the reference kernel; the rows of `x` and of `residual` may have any stride."""
    tokens, size = x.shape
    x = x if x.stride(1) == 1 else x.contiguous()
    out = torch.empty((tokens, size), dtype=x.dtype, device=x.device)
    if tokens:
        _add_rms_norm[(tokens,)](
            x,
            residual,
            weight,
            out,
            eps,
            STRIDE=x.stride(0),
            RESIDUAL_STRIDE=residual.stride(0),
            SIZE=size,
            BLOCK=triton.next_power_of_2(size),
            PLUS_ONE=plus_one,
            num_warps=row_warps(size),
        )
    return out, residual


@triton.jit
def _add_rms_norm(
    x,
    residual,
    weight,
    out,
    eps,
    STRIDE: tl.constexpr,
    RESIDUAL_STRIDE: tl.constexpr,
    SIZE: tl.constexpr,
    BLOCK: tl.constexpr,
    PLUS_ONE: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    columns = tl.arange(0, BLOCK)
    inside = columns < SIZE
    residual += row * RESIDUAL_STRIDE + columns
    values = tl.load(x + row * STRIDE + columns, mask=inside, other=0.0).to(tl.float32)
    values += tl.load(residual, mask=inside, other=0.0).to(tl.float32)
    # The norm is of the rounded sum, since that is what the stream holds from here on.
    rounded = values.to(out.dtype.element_ty)
    tl.store(residual, rounded, mask=inside)
    factors = tl.load(weight + columns, mask=inside, other=0.0).to(tl.float32)
    normed = normalised_row(rounded.to(tl.float32), factors, eps, SIZE, PLUS_ONE)
    tl.store(out + row * SIZE + columns, normed.to(out.dtype.element_ty), mask=inside)
