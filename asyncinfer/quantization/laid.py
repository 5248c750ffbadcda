"""`LaidWeight`: a matrix in the blocks that a CPU's kernels multiply."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Self

import torch

from asyncinfer.kernels.native import Layout
from asyncinfer.quantization.packed_weight import WeightOfBlocks
from asyncinfer.quantization.weight import QuantisedWeight

__all__ = ["BlockEnds", "LaidWeight", "laid"]

_FLOAT16_MOST = 65504.0
#: Scales below lose bits in float16.
_FLOAT16_LEAST = 2.0**-14


@dataclass(frozen=True, slots=True, eq=False)
class LaidWeight(WeightOfBlocks):
    """A weight `[..., out, in]` on a CPU: behind the numbers of each group lie its scale, and its
    offset if it has one. Both are float16 behind whole numbers of 4 bits, and behind others where
    that rounds nothing; else float32. What a number stands for is multiplied by `factor`."""

    #: uint8 `[..., out, groups, block]`.
    blocks: torch.Tensor
    layout: Layout
    factor: float
    dtype: torch.dtype

    @property
    def numbers(self) -> torch.Tensor:
        """uint8 `[..., out, groups, bytes]`, a view."""
        return self.blocks[..., : self.layout.numbers]

    @property
    def shape(self) -> tuple[int, ...]:
        *rows, groups, _ = self.blocks.shape
        return (*rows, groups * self.layout.group)

    def view(self, *leading: int) -> Self:
        return self._each(lambda blocks: blocks.reshape(*leading, *blocks.shape[-2:]))

    def grouped(self) -> QuantisedWeight:
        """The same weight with numbers, scales and offsets apart."""
        layout = self.layout
        numbers = self.numbers.flatten(-2)
        kind = torch.float16 if layout.halves else torch.float32
        ends = self.blocks[..., layout.numbers :].contiguous().view(kind).float().mul_(self.factor)
        offsets = ends[..., 1].contiguous() if layout.offset else None
        whole = layout.code in ("int4", "int8")
        code = "int" if whole else layout.code
        if layout.bits == 8:
            numbers = numbers.view(torch.int8)
        return QuantisedWeight(numbers, ends[..., 0].contiguous(), offsets, self.dtype, code)

    def dequantised(self, dtype: torch.dtype | None = None) -> torch.Tensor:
        return self.grouped().dequantised(dtype)

    def _each(self, change: Callable[[torch.Tensor], torch.Tensor]) -> Self:
        return replace(self, blocks=change(self.blocks))


@dataclass(frozen=True, slots=True, eq=False)
class BlockEnds:
    """What follows the numbers of each group, and the layout that it makes."""

    #: uint8 `[..., out, groups, bytes]`.
    ends: torch.Tensor
    layout: Layout
    factor: float

    @classmethod
    def of(cls, code: str, group: int, scales: torch.Tensor, offsets: torch.Tensor | None) -> Self:
        """The ends for scales and offsets `[..., out, groups]`, of numbers by `code`, as `Layout`
        names it."""
        # float16 holds scales that come in it.
        fits = scales.dtype is torch.float16
        # torch's rows of whole numbers of 4 bits have offsets.
        torch_s = code == "int4"
        if offsets is None:
            both = (scales, torch.zeros_like(scales)) if torch_s else (scales,)
        else:
            both = scales, offsets
        factor = 1.0 if fits else _factor(*both)
        halves = scales.new_empty((*scales.shape, len(both)), dtype=torch.float16)
        for number, part in enumerate(both):
            halves[..., number].copy_(part if factor == 1.0 else part.float() / factor)
        if torch_s:
            return cls(halves.view(torch.uint8), Layout(code, group, True, True), factor)
        ends = torch.stack([part.float() for part in both], dim=-1)
        exact = torch.equal(halves.float().mul_(factor), ends)
        layout = Layout(code, group, exact, len(both) == 2)
        ends = (halves if exact else ends).view(torch.uint8)
        return cls(ends, layout, factor if exact else 1.0)


def laid(weight: QuantisedWeight) -> LaidWeight:
    """`weight` `[..., out, in]` in blocks."""
    found = BlockEnds.of(weight.named, weight.group, weight.scales, weight.offsets)
    grouped = weight.numbers.view(torch.uint8).view(*weight.scales.shape, -1)
    blocks = torch.cat((grouped, found.ends), dim=-1)
    return LaidWeight(blocks, found.layout, found.factor, weight.dtype)


def _bounds(part: torch.Tensor) -> tuple[float, float]:
    """The least and the largest number; NaN where one is."""
    low, high = part.aminmax()
    return low.item(), high.item()


def _factor(scales: torch.Tensor, offsets: torch.Tensor | None = None) -> float:
    """A power of two by which scales and offsets are divided to suit float16."""
    low, high = _bounds(scales)
    if low > 0:
        least, most = low, high
    else:
        sizes = scales.float().abs()
        most = sizes.max().item()
        least = torch.where(sizes > 0, sizes, math.inf).min().item()
    if offsets is not None:
        # A NaN among the numbers makes the largest one NaN.
        most = torch.tensor([most, *map(abs, _bounds(offsets))], dtype=torch.float32).max().item()
    if most <= _FLOAT16_MOST and least >= _FLOAT16_LEAST:
        return 1.0
    if not math.isfinite(most):
        # A broken file: its bad groups become NaN, and the others stay right.
        return 1.0
    # The largest scale or offset comes to lie between 2^14 and 2^15.
    return float(2.0 ** (math.floor(math.log2(most)) - 14))
