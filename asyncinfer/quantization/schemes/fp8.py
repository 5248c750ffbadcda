"""Matrices of 8-bit floats, with scales for the whole, for each output or for blocks."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch

from asyncinfer.kernels.codes import copy_e4m3
from asyncinfer.kernels.layouts import WeightLayout
from asyncinfer.quantization.schemes.bits import e8m0
from asyncinfer.quantization.schemes.matrix import (
    FLOATS,
    GroupEnds,
    MatrixFormat,
    Part,
    Rows,
    StoredNumbers,
    has_nan,
)

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
            # The zero points of compressed-tensors, whose floats are symmetric.
            Part((".weight_zero_point",), (), ("F8_E4M3",), optional=True, unread=True),
            Part((".input_zero_point",), (), ("F8_E4M3",), optional=True, unread=True),
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

    def numbers(self, shape: tuple[int, ...]) -> StoredNumbers | None:
        return StoredNumbers(".weight", "e4m3")

    def ends(self, parts: Mapping[str, torch.Tensor], shape: tuple[int, ...]) -> GroupEnds | None:
        outputs, scales = shape[0], e8m0(parts[".weight_scale_inv"])
        if self.block is None:
            return GroupEnds(scales.reshape(-1, 1).expand(outputs, 1))
        of_outputs = torch.arange(outputs, device=scales.device) // self.block[0]
        return GroupEnds(scales, of_outputs=of_outputs)


def _floats(numbers: torch.Tensor) -> torch.Tensor:
    """The numbers as float32. A NaN in a file stays one."""
    if has_nan(numbers):
        return numbers.float()
    floats = torch.empty(numbers.shape, dtype=torch.float32, device=numbers.device)
    return copy_e4m3(floats, numbers)
