"""`PackedWeight`: a quantised matrix on its way from a checkpoint to a layer."""

from __future__ import annotations

from abc import ABC, abstractmethod

import torch

__all__ = ["PackedWeight", "as_tensor"]


class PackedWeight(ABC):
    """A weight `[..., out, in]` that is held in fewer bits than its floats. Leading dimensions are
    those of experts. Its inputs stay where they are; rows can be picked and put in another
    order."""

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
        """Bytes in memory, with scales and offsets."""

    @abstractmethod
    def __getitem__(self, index: int | slice | torch.Tensor) -> PackedWeight:
        """A part of the first dimension: an expert, or rows."""

    @abstractmethod
    def clone(self) -> PackedWeight: ...

    @abstractmethod
    def view(self, *leading: int) -> PackedWeight | torch.Tensor:
        """The weight with other dimensions before the inputs; one may be -1."""

    @abstractmethod
    def dequantised(self, dtype: torch.dtype | None = None) -> torch.Tensor:
        """`[..., out, in]` as floats, computed in float32; None: in the model's dtype."""


def as_tensor(weight: torch.Tensor | PackedWeight) -> torch.Tensor:
    """`weight` itself, or its numbers as floats."""
    return weight.dequantised() if isinstance(weight, PackedWeight) else weight
