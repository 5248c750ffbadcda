"""Weights in blocks that are made here, where native code reads none of oneDNN's."""

from __future__ import annotations

import functools
import sys
from typing import Final

import torch
import torch.nn.functional as F

from asyncinfer.kernels.native.blocked import (
    BLOCK_OUTPUTS,
    BlockedKernel,
    BlockedWeight,
    blocked_kernel,
)

__all__ = ["in_blocks", "own_blocks_work", "read_own_blocks"]

#: Outputs of a block.
_OUTPUTS: Final = max(BLOCK_OUTPUTS)
#: Words of 32 bits of a line of a cache, which a block's inputs fill.
_LINE: Final = 16
#: Outputs and inputs of the trial's weight, and its rows of x: more than a tile has.
_TRIED: Final = 128, 96, 7


def in_blocks(weight: torch.Tensor, outputs: int = _OUTPUTS) -> torch.Tensor:
    """A copy of a `weight` `[out, in]` of float32, or bfloat16 with an even number of inputs, in
    blocks of so many outputs, as `blocked_code` says: int32 `[blocks, words of an output,
    outputs]`. Zeros fill the last block, and its inputs up to the end of a line."""
    plain = weight.contiguous()
    # Words begin at an even number of a tensor's memory.
    words = (plain.clone() if plain.storage_offset() % 2 else plain).view(torch.int32)
    short = -words.shape[1] % _LINE, -words.shape[0] % outputs
    if any(short):
        words = F.pad(words, (0, short[0], 0, short[1]))
    return words.view(-1, outputs, words.shape[1]).transpose(1, 2).contiguous()


def read_own_blocks(
    memory: torch.Tensor, shape: tuple[int, int], dtype: torch.dtype
) -> BlockedWeight | None:
    """What reads a weight of this shape, `[out, in]`, from the bytes of its `in_blocks`, uint8,
    which the caller keeps. It has as many outputs as fill its blocks. None where nothing does."""
    whole = -(-shape[0] // _OUTPUTS) * _OUTPUTS, shape[1]
    return BlockedWeight.of(memory.data_ptr(), memory.nbytes, whole, dtype, _OUTPUTS, sys.maxsize)


def own_blocks_work(dtype: torch.dtype, inputs: int) -> bool:
    """Whether native code multiplies weights of this dtype with so many inputs. The first call
    compares a product with torch's."""
    kernel = blocked_kernel(dtype, _OUTPUTS, inputs) if inputs % 4 == 0 else None
    return kernel is not None and _is_right(kernel)


@functools.cache
def _is_right(kernel: BlockedKernel) -> bool:
    outputs, inputs, rows = _TRIED
    dtype = torch.float32 if kernel.method == "floats" else torch.bfloat16
    generator = torch.Generator().manual_seed(0)
    weight, x = (
        torch.randn(count, inputs, generator=generator, dtype=torch.float32).to(dtype)
        for count in (outputs, rows)
    )
    blocks = in_blocks(weight)
    block = kernel.block_bytes(inputs)
    found = kernel(x, blocks.data_ptr(), outputs, inputs, block, most_rows=sys.maxsize)
    right = x.double() @ weight.double().T
    allowed = 1e-5 if dtype is torch.float32 else 1e-2
    return bool((found - right).abs().amax() <= allowed * right.abs().amax())
