"""`WeightLayout`: the properties of a quantised weight that a GPU's kernels are compiled for."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from asyncinfer.kernels.reference.floats_of import CODES

__all__ = ["WeightLayout"]

#: Kernels take groups of at least so many inputs, a power of two, or one group for a whole row.
_LEAST_GROUP: Final = 16


@dataclass(frozen=True, slots=True, order=True)
class WeightLayout:
    """The code of a weight's numbers, and the groups that share a scale."""

    #: The code of the numbers, by its name in `asyncinfer.kernels.codes`.
    code: str
    #: How many inputs share a scale; 0: all of a row.
    group: int
    #: Whether each group has an offset beside its scale.
    offsets: bool = False

    @property
    def readable(self) -> bool:
        """Whether a GPU's kernels read such a weight."""
        group = self.group
        fits = group == 0 or (group >= _LEAST_GROUP and group & (group - 1) == 0)
        return fits and self.code in CODES

    @property
    def powers(self) -> bool:
        """Whether scales are powers of two in one byte each, as MXFP4's are."""
        return self.code == "e2m1" and self.group == 32

    def bytes(self, inputs: int) -> float:
        """Bytes of a number on a GPU, in rows of so many inputs. Scales and offsets are float16,
        the scale of a whole row is float32."""
        by_rows = self.group == 0 and not self.offsets
        factors = 4 if by_rows else 1 if self.powers else 2 * (1 + self.offsets)
        return 1 / CODES[self.code] + factors / (self.group or inputs)

    def __str__(self) -> str:
        return f"{self.code} in {f'groups of {self.group}' if self.group else 'rows'}"
