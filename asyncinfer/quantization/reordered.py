"""`ReorderedWeight`: floats in the blocks in which oneDNN reads them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Self

import torch

from asyncinfer.kernels import onednn
from asyncinfer.kernels.native import BlockedWeight
from asyncinfer.kernels.onednn_memory import placed

__all__ = ["ReorderedWeight"]


@dataclass(frozen=True, slots=True, eq=False)
class ReorderedWeight:
    """A weight `[out, in]` on a CPU, for oneDNN's product and for native code."""

    #: For `onednn.linear`.
    tensor: torch.Tensor
    shape: tuple[int, int]
    #: For native code; None where it cannot read these blocks.
    native: BlockedWeight | None
    #: uint8: the memory where `tensor` lies; None: its own.
    memory: torch.Tensor | None = None

    @classmethod
    def of(cls, weight: torch.Tensor) -> Self:
        """A copy of `weight` `[out, in]`."""
        tensor, shape = onednn.reorder(weight), (weight.shape[0], weight.shape[1])
        return cls(tensor, shape, onednn.blocked(tensor, shape))

    @classmethod
    def at(
        cls,
        memory: torch.Tensor,
        shape: tuple[int, int],
        dtype: torch.dtype,
        layout: bytes,
        native: bool,
    ) -> Self:
        """The weight whose bytes are in `memory`, uint8, and whose `layout_of` was `layout`.
        `native`: whether native code reads it. Raises `RuntimeError` where torch cannot make it."""
        tensor = placed(memory, shape, dtype, layout)
        return cls(tensor, shape, onednn.read_blocked(tensor, shape) if native else None, memory)

    @property
    def dtype(self) -> torch.dtype:
        return self.tensor.dtype
