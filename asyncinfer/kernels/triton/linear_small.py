"""A linear layer for few tokens, with the norm before it and the gate or residual after it."""

from __future__ import annotations

import torch
import triton

from asyncinfer.kernels.linear_tiles import gemv_tokens, tiles_for
from asyncinfer.kernels.triton.gemv import gemv
from asyncinfer.kernels.triton.rms_norm import rms_norm
from asyncinfer.kernels.triton.skinny_gemm import skinny_gemm
from asyncinfer.kernels.triton.weight_format import group_of, itemsize_of, readable

__all__ = ["linear_small"]


def linear_small(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None = None,
    *,
    scales: torch.Tensor | None = None,
    offsets: torch.Tensor | None = None,
    code: str | None = None,
    norm: torch.Tensor | None = None,
    eps: float = 1e-6,
    plus_one: bool = False,
    activation: str | None = None,
    residual: torch.Tensor | None = None,
    arrivals: torch.Tensor | None = None,
) -> torch.Tensor:
    """As the reference kernel, rounded once at the end.

    The kernel is one launch. With more tokens than a GEMV takes, the norm is another launch, since
    inputs then go from memory to the tensor cores unchanged. The order of a sum depends on the
    weight's shape, and on the number of tokens only by the buckets of `tiles_for`.
    """
    tokens, inputs = x.shape
    outputs = weight.shape[0]
    size = outputs if activation is None else outputs // 2
    out = torch.empty((tokens, size), dtype=x.dtype, device=x.device)
    if not tokens:
        return out
    itemsize = itemsize_of(weight)
    group = group_of(inputs, scales, offsets, code)
    scales, offsets = readable(scales), readable(offsets)
    gemv_most = gemv_tokens(itemsize)
    if norm is not None and tokens > gemv_most:
        x, norm = rms_norm(x, norm, eps, plus_one=plus_one), None
    x = x if x.stride(1) == 1 else x.contiguous()
    tiles = tiles_for(outputs, inputs, tokens, itemsize)
    blocks = triton.cdiv(outputs, tiles.rows)
    residual_stride = 0 if residual is None else residual.stride(0)
    if tokens <= gemv_most:
        gemv[(blocks,)](
            x, weight, scales, offsets, bias, residual, norm, out, eps,
            X_STRIDE=x.stride(0), RESIDUAL_STRIDE=residual_stride, TOKENS=tokens, OUTPUTS=outputs,
            INPUTS=inputs, BLOCK_N=tiles.rows, BLOCK_K=tiles.depth, GROUP=group, CODE=code,
            STAGES=tiles.stages, ACTIVATION=activation, PLUS_ONE=plus_one, num_warps=tiles.warps,
        )  # fmt: skip
        return out
    block_m = max(16, triton.next_power_of_2(tokens))
    partials = None
    if tiles.splits > 1:
        parts = (blocks, tiles.splits, tiles.rows, block_m)
        partials = torch.empty(parts, dtype=torch.float32, device=x.device)
        if arrivals is None:
            arrivals = torch.zeros(blocks, dtype=torch.int32, device=x.device)
    skinny_gemm[(blocks, tiles.splits)](
        x,
        weight,
        scales,
        offsets,
        bias,
        residual,
        out,
        partials,
        arrivals,
        tokens,
        X_STRIDE=x.stride(0),
        RESIDUAL_STRIDE=residual_stride,
        OUTPUTS=outputs,
        INPUTS=inputs,
        BLOCK_M=block_m,
        BLOCK_N=tiles.rows,
        BLOCK_K=tiles.depth,
        GROUP=group,
        CODE=code,
        SPLITS=tiles.splits,
        STAGES=tiles.stages,
        ACTIVATION=activation,
        num_warps=tiles.warps,
    )
    return out
