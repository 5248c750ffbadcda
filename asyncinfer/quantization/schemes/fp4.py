"""Matrices of 4-bit floats (e2m1): MXFP4 and NVFP4."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar, Literal

import torch

from asyncinfer.kernels.layouts import WeightLayout
from asyncinfer.quantization.schemes.bits import e2m1, e8m0
from asyncinfer.quantization.schemes.matrix import (
    FLOATS,
    GroupEnds,
    MatrixFormat,
    Part,
    Rows,
    StoredNumbers,
)

__all__ = ["Fp4Matrix", "Mxfp4Experts"]


@dataclass(frozen=True, slots=True)
class Fp4Matrix(MatrixFormat):
    """4-bit floats with a scale for each `group` inputs, which is itself a byte. In NVFP4 a float
    of the whole matrix multiplies them, or divides them."""

    group: int
    numbers_in: str = ".weight_packed"
    scale_of_all: Literal[".weight_global_scale", ".weight_scale_2"] | None = None

    def parts(self, shape: tuple[int, ...]) -> tuple[Part, ...]:
        outputs, inputs = shape
        if inputs % self.group or inputs % 2:
            raise ValueError(f"{inputs} inputs: must divide by 2 and by the group of {self.group}")
        scales = ("U8", "F8_E8M0") if self.scale_of_all is None else ("F8_E4M3",)
        parts = (
            Part((self.numbers_in,), ((outputs, inputs // 2),), ("U8",)),
            Part((".weight_scale",), ((outputs, inputs // self.group),), scales),
            Part((".input_scale", ".input_global_scale"), (), FLOATS, optional=True, unread=True),
        )
        if self.scale_of_all is None:
            return parts
        return (*parts, Part((self.scale_of_all,), ((), (1,)), ("F32",)))

    def rows(self, parts: Mapping[str, torch.Tensor], shape: tuple[int, ...]) -> Rows:
        numbers, scales = parts[self.numbers_in], self._scales(parts)

        def dequantised(first: int, end: int) -> torch.Tensor:
            floats = e2m1(numbers[first:end]).view(end - first, -1, self.group)
            return floats.mul_(scales[first:end, :, None]).view(end - first, shape[1])

        return dequantised

    def keeps(self, shape: tuple[int, ...]) -> bool:
        return True

    @property
    def layout(self) -> WeightLayout | None:
        return WeightLayout("e2m1", self.group)

    def numbers(self, shape: tuple[int, ...]) -> StoredNumbers | None:
        return StoredNumbers(self.numbers_in, "e2m1")

    def ends(self, parts: Mapping[str, torch.Tensor], shape: tuple[int, ...]) -> GroupEnds | None:
        return GroupEnds(self._scales(parts))

    def _scales(self, parts: Mapping[str, torch.Tensor]) -> torch.Tensor:
        """float32 `[out, groups]`."""
        scales = e8m0(parts[".weight_scale"])
        if self.scale_of_all is None:
            return scales
        whole = parts[self.scale_of_all]
        return scales / whole if self.scale_of_all == ".weight_global_scale" else scales * whole


@dataclass(frozen=True, slots=True)
class Mxfp4Experts(MatrixFormat):
    """All experts' matrices in one tensor, as gpt-oss has them: `_blocks` `[experts, out, in / 32,
    16]` and `_scales` `[experts, out, in / 32]`. Dequantised they are `[experts, in, out]`."""

    dimensions: ClassVar = 3

    def parts(self, shape: tuple[int, ...]) -> tuple[Part, ...]:
        experts, inputs, outputs = shape
        if inputs % 32:
            raise ValueError(f"{inputs} inputs: must divide by 32")
        scales = experts, outputs, inputs // 32
        return (
            Part(("_blocks",), ((*scales, 16), (experts, outputs, inputs // 2)), ("U8",)),
            Part(("_scales",), (scales,), ("U8", "F8_E8M0")),
        )

    def rows(self, parts: Mapping[str, torch.Tensor], shape: tuple[int, ...]) -> Rows:
        experts, inputs, outputs = shape
        blocks = parts["_blocks"].view(experts, outputs, inputs // 2)
        scales = e8m0(parts["_scales"])

        def dequantised(first: int, end: int) -> torch.Tensor:
            floats = e2m1(blocks[first:end]).view(end - first, outputs, -1, 32)
            floats.mul_(scales[first:end, :, :, None])
            return floats.view(end - first, outputs, inputs).transpose(1, 2)

        return dequantised

    def keeps(self, shape: tuple[int, ...]) -> bool:
        return True

    @property
    def layout(self) -> WeightLayout | None:
        return WeightLayout("e2m1", 32)

    def numbers(self, shape: tuple[int, ...]) -> StoredNumbers | None:
        # `[experts, out, in]`, the inputs last, as a `QuantisedWeight` has them.
        return StoredNumbers("_blocks", "e2m1")

    def ends(self, parts: Mapping[str, torch.Tensor], shape: tuple[int, ...]) -> GroupEnds | None:
        return GroupEnds(e8m0(parts["_scales"]))
