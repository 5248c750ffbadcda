"""Root mean square layer normalisation (Zhang and Sennrich, 2019), one program for each row."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from asyncinfer.kernels.triton.launched import launched

__all__ = ["add_rms_norm", "normalised_row", "rms_norm", "row_warps"]


def rms_norm(
    x: torch.Tensor, weight: torch.Tensor, eps: float, *, plus_one: bool = False
) -> torch.Tensor:
    """As the reference kernel. The rows of `x` may have any stride."""
    size = x.shape[-1]
    rows = x.reshape(-1, size)
    rows = rows if rows.stride(1) == 1 else rows.contiguous()
    out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    if out.numel():
        _rms_norm[(rows.shape[0],)](
            rows,
            weight,
            out,
            eps,
            STRIDE=rows.stride(0),
            SIZE=size,
            BLOCK=triton.next_power_of_2(size),
            PLUS_ONE=plus_one,
            num_warps=row_warps(size),
        )
    return out


def add_rms_norm(
    x: torch.Tensor,
    residual: torch.Tensor,
    weight: torch.Tensor,
    eps: float,
    *,
    plus_one: bool = False,
) -> tuple[torch.Tensor, torch.Tensor]:
    """As the reference kernel. The rows of `x` and `residual` may have any stride."""
    x, residual = (t if t.stride(1) == 1 else t.contiguous() for t in (x, residual))
    total, normed = (torch.empty(x.shape, dtype=x.dtype, device=x.device) for _ in range(2))
    tokens, size = x.shape
    if total.numel():
        _add_rms_norm[(tokens,)](
            x,
            residual,
            weight,
            total,
            normed,
            eps,
            STRIDE=x.stride(0),
            RESIDUAL_STRIDE=residual.stride(0),
            SIZE=size,
            BLOCK=triton.next_power_of_2(size),
            PLUS_ONE=plus_one,
            num_warps=row_warps(size),
        )
    return total, normed


def row_warps(size: int) -> int:
    """Warps for a row of `size` elements, which one program holds in registers: 16 elements a
    thread up to 8,192 elements, more above that."""
    block: int = triton.next_power_of_2(size)
    return min(max(block // 512, 1), 16)


@launched()
def _rms_norm(
    x,
    weight,
    out,
    eps,
    STRIDE: tl.constexpr,
    SIZE: tl.constexpr,
    BLOCK: tl.constexpr,
    PLUS_ONE: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    columns = tl.arange(0, BLOCK)
    inside = columns < SIZE
    values = tl.load(x + row * STRIDE + columns, mask=inside, other=0.0).to(tl.float32)
    factors = tl.load(weight + columns, mask=inside, other=0.0).to(tl.float32)
    normed = normalised_row(values, factors, eps, SIZE, PLUS_ONE)
    tl.store(out + row * SIZE + columns, normed.to(out.dtype.element_ty), mask=inside)


@launched()
def _add_rms_norm(
    x,
    residual,
    weight,
    total,
    normed,
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
    values = tl.load(x + row * STRIDE + columns, mask=inside, other=0.0).to(tl.float32)
    added = tl.load(residual + row * RESIDUAL_STRIDE + columns, mask=inside, other=0.0)
    # The rounded sum is normalised, since later layers get it rounded.
    rounded = (values + added.to(tl.float32)).to(total.dtype.element_ty)
    tl.store(total + row * SIZE + columns, rounded, mask=inside)
    factors = tl.load(weight + columns, mask=inside, other=0.0).to(tl.float32)
    result = normalised_row(rounded.to(tl.float32), factors, eps, SIZE, PLUS_ONE)
    tl.store(normed + row * SIZE + columns, result.to(normed.dtype.element_ty), mask=inside)


@triton.jit
def normalised_row(values, factors, eps, SIZE: tl.constexpr, PLUS_ONE: tl.constexpr):
    """float32 `values` `[n]`, zero beyond `SIZE`, over their root mean square, times `factors`."""
    if PLUS_ONE:
        factors += 1.0
    return values * tl.rsqrt(tl.sum(values * values, axis=0) / SIZE + eps) * factors
