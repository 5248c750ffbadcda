"""`MatrixFormat`: how a quantised checkpoint holds one matrix."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import ClassVar, Final, TypeAlias

import torch

from asyncinfer.kernels.layouts import WeightLayout
from asyncinfer.quantization.weight import QuantisedWeight

__all__ = ["FLOATS", "HALVES", "BadPart", "MatrixFormat", "Part", "Rows"]

#: safetensors' names of the dtypes that scales come in.
FLOATS: Final = ("F32", "BF16", "F16")
#: The same with the usual one first.
HALVES: Final = ("F16", "BF16", "F32")

#: Dequantises the rows `first` to `end - 1` of a matrix: float32.
Rows: TypeAlias = "Callable[[int, int], torch.Tensor]"


class BadPart(Exception):
    """A tensor of a quantised matrix holds values that are not valid there."""

    def __init__(self, part: str, why: str) -> None:
        super().__init__(why)
        #: The first of the part's suffixes.
        self.part = part


@dataclass(frozen=True, slots=True)
class Part:
    """One of the tensors that hold a matrix."""

    #: What follows the matrix's name without ".weight". The first names the part; the others are
    #: what other makers write.
    suffixes: tuple[str, ...]
    #: The shapes it may have, the usual one first; empty: any.
    shapes: tuple[tuple[int, ...], ...]
    #: safetensors' names of the dtypes it may have, the usual one first.
    dtypes: tuple[str, ...]
    optional: bool = False
    #: Whether it says nothing about the weights, such as a scale of activations.
    unread: bool = False


class MatrixFormat(ABC):
    """The numbers of a matrix in the tensors of a checkpoint. Frozen dataclasses derive from it."""

    #: Dimensions of the matrices that can be held so.
    dimensions: ClassVar[int] = 2

    @abstractmethod
    def parts(self, shape: tuple[int, ...]) -> tuple[Part, ...]:
        """The tensors that hold a matrix of this shape, the numbers first. Raises `ValueError`,
        which says why, where no matrix of this shape can be held."""

    @abstractmethod
    def rows(self, parts: Mapping[str, torch.Tensor], shape: tuple[int, ...]) -> Rows:
        """Dequantises rows of the matrix. `parts` are on one device, by their first suffixes.
        Raises `BadPart`."""

    def keeps(self, shape: tuple[int, ...]) -> bool:
        """Whether `kept` may hold a matrix of this shape."""
        return False

    @property
    def layout(self) -> WeightLayout | None:
        """How `kept` holds matrices; None where it keeps none."""
        return None

    def kept(
        self, parts: Mapping[str, torch.Tensor], shape: tuple[int, ...], dtype: torch.dtype
    ) -> QuantisedWeight | None:
        """The matrix with its numbers as they are, for a model of this dtype; None where the values
        say groups are not of neighbouring inputs. Raises `BadPart`."""
        raise NotImplementedError
