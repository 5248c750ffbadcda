"""`NativeWeight`: floats in the blocks that native code alone reads."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Self

import torch

from asyncinfer.kernels.native import BlockedWeight, in_blocks, read_own_blocks

__all__ = ["NativeWeight"]


@dataclass(frozen=True, slots=True, eq=False)
class NativeWeight:
    """A weight `[out, in]` on a CPU for which oneDNN has no fast product."""

    #: uint8: its blocks.
    memory: torch.Tensor
    shape: tuple[int, int]
    dtype: torch.dtype
    #: Its product, which has as many outputs as fill the blocks.
    product: BlockedWeight

    @classmethod
    def of(cls, weight: torch.Tensor) -> Self:
        """A copy of `weight` `[out, in]`."""
        memory = in_blocks(weight).view(torch.uint8).flatten()
        return cls.at(memory, (weight.shape[0], weight.shape[1]), weight.dtype)

    @classmethod
    def at(cls, memory: torch.Tensor, shape: tuple[int, int], dtype: torch.dtype) -> Self:
        """The weight whose blocks are in `memory`, uint8. Raises `RuntimeError` where native code
        does not read them."""
        product = read_own_blocks(memory, shape, dtype)
        if product is None:
            raise RuntimeError("native code does not read these blocks")
        return cls(memory, shape, dtype, product)

    @property
    def nbytes(self) -> int:
        return self.memory.nbytes
