"""`QuantisedWeight`: a matrix as numbers of 4 or 8 bits, with a scale for each group."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Self

import torch

from asyncinfer.kernels.codes import decoded
from asyncinfer.kernels.layouts import WeightLayout
from asyncinfer.quantization.packed_weight import PackedWeight

__all__ = ["QuantisedWeight"]

#: Numbers of a matrix that are converted at a time, so that no float32 copy of it is ever whole.
_PART = 1 << 20
#: The codes whose values are whole numbers once they are multiplied by this.
_WHOLE = {"int": 1, "e2m1": 2, "iq4": 1}


@dataclass(frozen=True, slots=True, eq=False)
class QuantisedWeight(PackedWeight):
    """A weight `[..., out, in]`: `w = value * scale + offset`, where `code` says which value a
    number stands for, and `group` neighbours along the inputs share a scale and an offset. Leading
    dimensions are those of experts.

    Every scheme of quantised checkpoints in the Hugging Face format is converted to this, and every
    device then lays it out for its own products.
    """

    #: uint8 `[..., out, in / 2]`: two numbers of 0 to 15 a byte, the input 2j in the low half of
    #: byte j and 2j + 1 in the high one. Or int8 `[..., out, in]`: -128 to 127.
    numbers: torch.Tensor
    #: `[..., out, in / group]`, of any float dtype.
    scales: torch.Tensor
    #: As `scales`; None: zeros.
    offsets: torch.Tensor | None
    #: The model's dtype, which the inputs and outputs of products have.
    dtype: torch.dtype
    #: What numbers stand for. "int": themselves, 0 to 15 of 4 bits and -128 to 127 of 8; or another
    #: code of `asyncinfer.kernels.codes`, of 4 bits a table's name and of 8 bits "e4m3".
    code: str = "int"

    def __post_init__(self) -> None:
        assert self.numbers.dtype in (torch.uint8, torch.int8)
        assert self.scales.shape[:-1] == self.numbers.shape[:-1]
        assert self.inputs % self.scales.shape[-1] == 0
        assert self.offsets is None or self.offsets.shape == self.scales.shape

    @classmethod
    def cat(cls, parts: Sequence[Self]) -> Self:
        """Rows of several weights below each other, which have the same inputs and dtypes. All get
        the smallest of their groups, and whole numbers of 8 bits if their codes differ."""
        if len(parts) == 1:
            return parts[0]
        assert cls.joinable(parts)
        if len({(part.bits, part.code) for part in parts}) > 1:
            parts = [part.widened() for part in parts]
        group = min(part.group for part in parts)
        parts = [part.regrouped(group) for part in parts]
        offsets = None
        if any(part.offsets is not None for part in parts):
            offsets = torch.cat(
                [torch.zeros_like(p.scales) if p.offsets is None else p.offsets for p in parts]
            )
        numbers = torch.cat([part.numbers for part in parts])
        scales = torch.cat([part.scales for part in parts])
        return cls(numbers, scales, offsets, parts[0].dtype, parts[0].code)

    @classmethod
    def joinable(cls, parts: Sequence[Self]) -> bool:
        """Whether `cat` can hold these weights as one: their codes are one, or have all whole
        numbers."""
        kinds = {(part.bits, part.code) for part in parts}
        return len(kinds) == 1 or all(code in _WHOLE for _, code in kinds)

    @property
    def bits(self) -> int:
        """Bits of a number: 4 or 8."""
        return 4 if self.numbers.dtype is torch.uint8 else 8

    @property
    def named(self) -> str:
        """The code by its name in `asyncinfer.kernels.codes`."""
        return f"int{self.bits}" if self.code == "int" else self.code

    @property
    def inputs(self) -> int:
        return self.numbers.shape[-1] * (8 // self.bits)

    @property
    def group(self) -> int:
        """How many inputs share a scale."""
        return self.inputs // self.scales.shape[-1]

    @property
    def layout(self) -> WeightLayout:
        """How the numbers lie in memory."""
        group = 0 if self.group == self.inputs else self.group
        return WeightLayout(self.named, group, self.offsets is not None)

    @property
    def shape(self) -> tuple[int, ...]:
        return (*self.numbers.shape[:-1], self.inputs)

    @property
    def device(self) -> torch.device:
        return self.numbers.device

    @property
    def nbytes(self) -> int:
        offsets = 0 if self.offsets is None else self.offsets.nbytes
        return self.numbers.nbytes + self.scales.nbytes + offsets

    def __getitem__(self, index: int | slice | torch.Tensor) -> Self:
        return self._each(lambda part: part[index])

    def clone(self) -> Self:
        return self._each(torch.Tensor.clone)

    def view(self, *leading: int) -> Self:
        return self._each(lambda part: part.reshape(*leading, part.shape[-1]))

    def to(self, dtype: torch.dtype) -> Self:
        """The weight for a model of another dtype, with the same numbers."""
        return replace(self, dtype=dtype)

    def inputs_swapped(self, outer: int, inner: int) -> Self:
        """The weight with its inputs, `outer` times `inner` runs of neighbours, as `inner` times
        `outer`. A run must consist of whole groups."""
        assert self.inputs % (outer * inner * self.group) == 0
        return self._each(
            lambda part: part.view(*part.shape[:-1], outer, inner, -1).transpose(-3, -2).flatten(-3)
        )

    def widened(self) -> Self:
        """The same weight in whole numbers of 8 bits, which some codes have."""
        if self.bits == 8:
            assert self.code == "int"
            return self
        times = _WHOLE[self.code]
        numbers = decoded(self.numbers, self.named).mul_(times).to(torch.int8)
        scales = self.scales if times == 1 else self.scales.float() / times
        return replace(self, numbers=numbers, scales=scales, code="int")

    def regrouped(self, group: int) -> Self:
        """The same weight in smaller groups."""
        if self.group == group:
            return self
        times = self.group // group
        assert times * group == self.group
        scales = self.scales.repeat_interleave(times, -1)
        offsets = None if self.offsets is None else self.offsets.repeat_interleave(times, -1)
        return replace(self, scales=scales, offsets=offsets)

    def dequantised(self, dtype: torch.dtype | None = None) -> torch.Tensor:
        whole = torch.empty(self.shape, dtype=dtype or self.dtype, device=self.device)
        flat, rows = whole.view(-1, self.inputs), self.view(-1)
        step = max(1, _PART // self.inputs)
        for start in range(0, len(flat), step):
            flat[start : start + step] = _floats(rows[start : start + step])
        return whole

    def _each(self, change: Callable[[torch.Tensor], torch.Tensor]) -> Self:
        """The weight with a change applied to numbers, scales and offsets, of dimensions before the
        last."""
        offsets = None if self.offsets is None else change(self.offsets)
        return replace(
            self, numbers=change(self.numbers), scales=change(self.scales), offsets=offsets
        )


def _floats(rows: QuantisedWeight) -> torch.Tensor:
    """float32 `[out, in]`."""
    floats = decoded(rows.numbers, rows.named)
    floats = floats.view(*rows.scales.shape, rows.group)
    floats = floats.mul_(rows.scales.float()[..., None])
    if rows.offsets is not None:
        floats = floats.add_(rows.offsets.float()[..., None])
    return floats.flatten(-2)
