"""Low-rank adapters (LoRA: Hu et al., 2021) in two launches, whatever adapters the rows have."""

from __future__ import annotations

import torch
import triton

from asyncinfer.kernels.triton.lora_rows import lora_down_rows, lora_up_rows
from asyncinfer.kernels.triton.lora_tiles import lora_down_tiles, lora_up_tiles

__all__ = ["lora_add"]

#: The most rows that are multiplied one by one: those of a decode step.
_ROWS = 64
#: Rows of a tile, where there are more.
_TILE = 32


def lora_add(
    y: torch.Tensor,
    x: torch.Tensor,
    down: torch.Tensor,
    up: torch.Tensor,
    ranks: torch.Tensor,
    slots: torch.Tensor,
    *,
    sizes: tuple[int, ...],
) -> torch.Tensor:
    """As the reference kernel. The grids of both launches depend on shapes only, so that a CUDA
    graph can record them. Programs of rows without an adapter end at once."""
    rows, inputs = x.shape
    if not rows:
        return y
    x = x if x.stride(1) == 1 else x.contiguous()
    rank, outputs = up.shape[1:]
    parts = len(sizes)
    inner = torch.empty((rows, rank * parts), dtype=torch.float32, device=x.device)
    first, second, third = (*sizes, 0, 0)[:3]
    strides = {"X_STRIDE": x.stride(0), "INPUTS": inputs, "RANKS": rank * parts, "PARTS": parts}
    columns = {
        "Y_STRIDE": y.stride(0),
        "OUTPUTS": outputs,
        "RANK": rank,
        "PARTS": parts,
        "FIRST": first,
        "SECOND": second,
        "THIRD": third,
    }
    few = rows <= _ROWS
    block = 128 if few else 64
    blocks = sum(triton.cdiv(size, block) for size in sizes)
    if few:
        lora_down_rows[(rows, triton.cdiv(rank * parts, 16))](
            x, down, ranks, slots, inner, **strides, BLOCK_R=16, BLOCK_K=256, num_warps=4
        )
        lora_up_rows[(rows, blocks)](
            inner, up, ranks, slots, y, **columns, BLOCK_N=block, BLOCK_R=16, num_warps=4
        )
        return y
    tiles = triton.cdiv(rows, _TILE)
    lora_down_tiles[(tiles, triton.cdiv(rank * parts, 16))](
        x,
        down,
        ranks,
        slots,
        inner,
        rows,
        **strides,
        BLOCK_M=_TILE,
        BLOCK_R=16,
        BLOCK_K=64,
        num_warps=4,
    )
    lora_up_tiles[(tiles, blocks)](
        inner,
        up,
        ranks,
        slots,
        y,
        rows,
        **columns,
        BLOCK_M=_TILE,
        BLOCK_N=block,
        BLOCK_R=16,
        num_warps=4,
    )
    return y
