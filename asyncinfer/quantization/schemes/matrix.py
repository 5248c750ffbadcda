"""`MatrixFormat`: how a quantised checkpoint holds one matrix."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import ClassVar, Final, TypeAlias

import torch

from asyncinfer.kernels.layouts import WeightLayout
from asyncinfer.kernels.orders import NumberOrder, ordered
from asyncinfer.quantization.weight import QuantisedWeight

__all__ = [
    "FLOATS",
    "HALVES",
    "BadPart",
    "GroupEnds",
    "MatrixFormat",
    "Part",
    "Rows",
    "StoredNumbers",
    "has_nan",
]

#: safetensors' names of the dtypes that scales come in.
FLOATS: Final = ("F32", "BF16", "F16")
#: The same with the usual one first.
HALVES: Final = ("F16", "BF16", "F32")

#: Dequantises the rows `first` to `end - 1` of a matrix to float32.
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


@dataclass(frozen=True, slots=True)
class StoredNumbers:
    """Which of a matrix's parts holds its numbers, and how."""

    part: str
    #: The code of the numbers, by its name in `asyncinfer.kernels.codes`.
    code: str
    order: NumberOrder = field(default_factory=NumberOrder)


@dataclass(frozen=True, slots=True, eq=False)
class GroupEnds:
    """Scales and offsets of a matrix, for each group of neighbouring inputs: `[..., out,
    groups]`."""

    scales: torch.Tensor
    offsets: torch.Tensor | None = None
    #: For each output its row of scales; None: each output has a row of its own.
    of_outputs: torch.Tensor | None = None

    @property
    def outputs(self) -> torch.Size:
        """`[..., out]`."""
        return self.scales.shape[:-1] if self.of_outputs is None else self.of_outputs.shape

    def apart(self) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Contiguous scales and offsets with a row for each output."""
        rows = self.of_outputs
        scales, offsets = (
            None if part is None else part if rows is None else part[rows]
            for part in (self.scales, self.offsets)
        )
        assert scales is not None
        return scales.contiguous(), None if offsets is None else offsets.contiguous()


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
        """The layout in which `kept` holds matrices; None if it keeps none."""
        return None

    def numbers(self, shape: tuple[int, ...]) -> StoredNumbers | None:
        """The numbers of a matrix that `kept` may hold, if their part can be read a piece at a
        time."""
        return None

    def ends(self, parts: Mapping[str, torch.Tensor], shape: tuple[int, ...]) -> GroupEnds | None:
        """Scales and offsets, from the parts beside the numbers; None if groups are not of
        neighbouring inputs. Raises `BadPart`."""
        raise NotImplementedError

    def kept(
        self, parts: Mapping[str, torch.Tensor], shape: tuple[int, ...], dtype: torch.dtype
    ) -> QuantisedWeight | None:
        """The matrix with its numbers unchanged, for a model of this dtype; None where `ends` is
        None, and where numbers are NaN. Raises `BadPart`."""
        found, ends = self.numbers(shape), self.ends(parts, shape)
        assert found is not None
        stored = parts[found.part]
        if ends is None or (found.code == "e4m3" and has_nan(stored)):
            return None
        rows = ends.outputs
        whole, bits = found.code in ("int4", "int8"), 8 if found.code in ("int8", "e4m3") else 4
        numbers = ordered(stored, found.order, rows.numel())
        if bits == 8:
            numbers = numbers.view(torch.int8)
        # Rows of words may end with unused bits.
        if found.order.kind == "rows" and len(shape) == 2:
            numbers = numbers[:, : shape[1] * bits // 8]
        numbers = numbers.reshape(*rows, -1)
        code = "int" if whole else found.code
        return QuantisedWeight(numbers, *ends.apart(), dtype, code)


def has_nan(numbers: torch.Tensor) -> bool:
    """Whether some e4m3 number is NaN, as in broken files only."""
    if not numbers.numel():
        return False
    # The largest signed and unsigned bytes, without a copy: 0x7f and 0xff are NaN.
    return bool(numbers.view(torch.int8).amax() == 127 or numbers.view(torch.uint8).amax() == 255)
