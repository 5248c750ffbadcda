"""Matrices of 8-bit floats, with scales for the whole, for each output or for blocks."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch

from asyncinfer.kernels.codes import copy_e4m3
from asyncinfer.kernels.layouts import WeightLayout
from asyncinfer.quantization.schemes.bits import e8m0
from asyncinfer.quantization.schemes.matrix import FLOATS, MatrixFormat, Part, Rows
from asyncinfer.quantization.weight import QuantisedWeight

__all__ = ["Fp8Matrix"]


@dataclass(frozen=True, slots=True)
class Fp8Matrix(MatrixFormat):
    """e4m3 numbers `[out, in]` times scales, which transformers calls `weight_scale_inv` and others
    `weight_scale`. Scales of activations are not used: activations keep the model's dtype."""

    #: Outputs and inputs that share a scale; None: there is one scale, or one for each output.
    block: tuple[int, int] | None = None

    def parts(self, shape: tuple[int, ...]) -> tuple[Part, ...]:
        outputs, inputs = shape
        scales: tuple[tuple[int, ...], ...] = ((), (1,), (1, 1), (outputs,), (outputs, 1))
        if self.block is not None:
            scales = ((-(-outputs // self.block[0]), -(-inputs // self.block[1])),)
        names = ".weight_scale_inv", ".weight_scale"
        return (
            Part((".weight",), (shape,), ("F8_E4M3",)),
            Part(names, scales, (*FLOATS, "F8_E8M0", "U8")),
            Part((".input_scale", ".activation_scale"), (), FLOATS, optional=True, unread=True),
            Part((".input_scale_ub",), (), FLOATS, optional=True, unread=True),
        )

    def rows(self, parts: Mapping[str, torch.Tensor], shape: tuple[int, ...]) -> Rows:
        numbers, scales = parts[".weight"], e8m0(parts[".weight_scale_inv"])

        def dequantised(first: int, end: int) -> torch.Tensor:
            part = _floats(numbers[first:end])
            if self.block is None:
                return part.mul_(scales if scales.numel() == 1 else scales.view(-1, 1)[first:end])
            outputs, inputs = self.block
            of_rows = torch.arange(first, end, device=part.device) // outputs
            return part.mul_(scales[of_rows].repeat_interleave(inputs, 1)[:, : shape[1]])

        return dequantised

    def keeps(self, shape: tuple[int, ...]) -> bool:
        return self.block is None or shape[1] % self.block[1] == 0

    @property
    def layout(self) -> WeightLayout | None:
        return WeightLayout("e4m3", 0 if self.block is None else self.block[1])

    def kept(
        self, parts: Mapping[str, torch.Tensor], shape: tuple[int, ...], dtype: torch.dtype
    ) -> QuantisedWeight | None:
        outputs = shape[0]
        numbers, scales = parts[".weight"].view(torch.int8), e8m0(parts[".weight_scale_inv"])
        if _has_nan(parts[".weight"]):
            return None
        if self.block is None:
            scales = scales.reshape(-1, 1).expand(outputs, 1)
        else:
            scales = scales[torch.arange(outputs, device=scales.device) // self.block[0]]
        return QuantisedWeight(numbers, scales, None, dtype, "e4m3")


def _has_nan(numbers: torch.Tensor) -> bool:
    """Whether e4m3 numbers have NaN, as only those of a broken file do."""
    if not numbers.numel():
        return False
    # The largest of the bytes with a sign and without: 0x7f and 0xff are NaN, and no copy is made.
    return bool(numbers.view(torch.int8).amax() == 127 or numbers.view(torch.uint8).amax() == 255)


def _floats(numbers: torch.Tensor) -> torch.Tensor:
    """The numbers as float32. The model computes with NaN where a file holds it."""
    if _has_nan(numbers):
        return numbers.float()
    floats = torch.empty(numbers.shape, dtype=torch.float32, device=numbers.device)
    return copy_e4m3(floats, numbers)
