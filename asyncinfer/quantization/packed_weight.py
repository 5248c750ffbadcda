"""`PackedWeight`: a quantised matrix on its way from a checkpoint to a layer."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Self

import torch

__all__ = ["PackedWeight", "WeightOfBlocks", "as_tensor"]


class PackedWeight(ABC):
    """A weight `[..., out, in]` held in fewer bits than its floats. Leading dimensions are those of
    experts. Its inputs keep their order; rows can be selected and reordered."""

    __slots__ = ()

    #: The model's dtype, which the inputs and outputs of products have.
    dtype: torch.dtype

    @property
    @abstractmethod
    def shape(self) -> tuple[int, ...]:
        """`(..., out, in)`."""

    @property
    @abstractmethod
    def device(self) -> torch.device: ...

    @property
    @abstractmethod
    def nbytes(self) -> int:
        """Bytes in memory, including scales and offsets."""

    @abstractmethod
    def __getitem__(self, index: int | slice | torch.Tensor) -> PackedWeight:
        """A part of the first dimension: an expert, or rows."""

    @abstractmethod
    def clone(self) -> PackedWeight: ...

    @abstractmethod
    def view(self, *leading: int) -> PackedWeight | torch.Tensor:
        """The weight with other leading dimensions; one of them may be -1."""

    @abstractmethod
    def dequantised(self, dtype: torch.dtype | None = None) -> torch.Tensor:
        """`[..., out, in]` as floats, computed in float32; None: in the model's dtype."""


class WeightOfBlocks(PackedWeight):
    """A weight whose numbers, scales and offsets lie in one tensor of bytes."""

    __slots__ = ()

    #: uint8; the first dimensions are those of the weight's rows.
    blocks: torch.Tensor

    @property
    def device(self) -> torch.device:
        return self.blocks.device

    @property
    def nbytes(self) -> int:
        return self.blocks.nbytes

    def __getitem__(self, index: int | slice | torch.Tensor) -> Self:
        if isinstance(index, torch.Tensor):
            # Copies whole rows, where indexing would copy byte by byte.
            return self._each(lambda blocks: blocks.index_select(0, index))
        return self._each(lambda blocks: blocks[index])

    def clone(self) -> Self:
        return self._each(torch.Tensor.clone)

    @abstractmethod
    def _each(self, change: Callable[[torch.Tensor], torch.Tensor]) -> Self:
        """The same weight with its bytes changed."""


def as_tensor(weight: torch.Tensor | PackedWeight) -> torch.Tensor:
    """`weight` itself if it is a tensor, else its numbers as floats."""
    return weight.dequantised() if isinstance(weight, PackedWeight) else weight
