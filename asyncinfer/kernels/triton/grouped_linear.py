"""Linear layers of many experts, each for rows of its own."""

from __future__ import annotations

import torch
import triton

from asyncinfer.kernels.linear_tiles import grouped_tiles, tiles_for
from asyncinfer.kernels.triton.grouped_gemm import grouped_gemm
from asyncinfer.kernels.triton.grouped_gemv import grouped_gemv
from asyncinfer.kernels.triton.weight_format import group_of, itemsize_of, readable

__all__ = ["grouped_linear"]

#: The most rows that are multiplied one by one: those of one token, with as many experts as models
#: choose for it.
_GEMV_ROWS = 8
#: Tiles of rows whose programs run together.
_TOGETHER = 8


def grouped_linear(
    x: torch.Tensor,
    weight: torch.Tensor,
    ends: torch.Tensor,
    bias: torch.Tensor | None = None,
    *,
    scales: torch.Tensor | None = None,
    offsets: torch.Tensor | None = None,
    code: str | None = None,
) -> torch.Tensor:
    """As the reference kernel, rounded once at the end.

    The kernel is one launch. Its grid depends on shapes only, so that the host need not know how
    many rows each expert has. The order of a sum depends on shapes only, too.
    """
    rows, inputs = x.shape
    experts, outputs, _ = weight.shape
    itemsize = itemsize_of(weight)
    out = torch.empty((rows, outputs), dtype=x.dtype, device=x.device)
    if not rows:
        return out
    x = x if x.stride(1) == 1 else x.contiguous()
    shape = {
        "X_STRIDE": x.stride(0),
        "EXPERTS": experts,
        "OUTPUTS": outputs,
        "INPUTS": inputs,
        "BLOCK_E": triton.next_power_of_2(experts),
        "GROUP": group_of(inputs, scales, offsets, code),
        "CODE": code,
    }
    scales, offsets = readable(scales), readable(offsets)
    if rows <= _GEMV_ROWS:
        tiles = tiles_for(outputs, inputs, 1, itemsize)
        grouped_gemv[(rows, triton.cdiv(outputs, tiles.rows))](
            x,
            weight,
            scales,
            offsets,
            ends,
            bias,
            out,
            **shape,
            BLOCK_N=tiles.rows,
            BLOCK_K=tiles.depth,
            STAGES=tiles.stages,
            num_warps=tiles.warps,
        )
        return out
    tokens, tiles = grouped_tiles(rows, experts, itemsize)
    # Each expert that has rows may have one tile that is not full.
    used = min(experts, rows)
    most = used + (rows - used) // tokens
    grouped_gemm[(most * triton.cdiv(outputs, tiles.rows),)](
        x,
        weight,
        scales,
        offsets,
        ends,
        bias,
        out,
        most,
        **shape,
        BLOCK_M=tokens,
        BLOCK_N=tiles.rows,
        BLOCK_K=tiles.depth,
        TOGETHER=_TOGETHER,
        STAGES=tiles.stages,
        num_warps=tiles.warps,
    )
    return out
