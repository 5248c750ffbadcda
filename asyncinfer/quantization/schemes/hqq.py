"""Matrices of HQQ (Badri and Shaji, 2023)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch

from asyncinfer.kernels.layouts import WeightLayout
from asyncinfer.quantization.schemes.bits import paired
from asyncinfer.quantization.schemes.matrix import HALVES, BadPart, MatrixFormat, Part, Rows
from asyncinfer.quantization.weight import QuantisedWeight

__all__ = ["HqqMatrix"]

#: Settings that `HQQLinear` saves beside numbers, scales and zeros; config.json has them too.
_SETTINGS = (
    *("nbits", "group_size", "axis", "channel_wise", "optimize", "round_zero", "packing", "shape"),
    *("view_as_float", "unpack_view_dtype", "compute_dtype", "quant_zero", "quant_scale"),
    *("offload_meta", "stores_quant_config", "encoded_state_dict"),
)
_ANY = ("U8", "I8", "I32", "I64", "F32", "BOOL")


@dataclass(frozen=True, slots=True)
class HqqMatrix(MatrixFormat):
    """`(number - zero) * scale`, of the matrix as `[groups, group]` (`axis` 1) or `[group, groups]`
    (`axis` 0). A byte holds numbers of several rows: its highest bits are of the first rows."""

    bits: int
    group: int | None
    axis: int

    def parts(self, shape: tuple[int, ...]) -> tuple[Part, ...]:
        rows, columns = self._grouped(shape)
        each = 8 // self.bits
        if rows % each:
            raise ValueError(f"{rows} rows of groups: must divide by {each}")
        scales = (rows, 1) if self.axis == 1 else (1, columns)
        parts = (
            Part((".W_q",), ((rows // each, columns),), ("U8",)),
            Part((".scale",), (scales,), HALVES),
            Part((".zero",), (scales,), HALVES),
            Part((".shape",), ((2,),), ("I64", "I32"), optional=True),
        )
        rest = (f".{name}" for name in _SETTINGS if name != "shape")
        return (*parts, *(Part((n,), (), _ANY, optional=True, unread=True) for n in rest))

    def rows(self, parts: Mapping[str, torch.Tensor], shape: tuple[int, ...]) -> Rows:
        _check_shape(parts, shape)
        packed, inputs = parts[".W_q"], shape[1]
        scales, zeros = (parts[name].float().flatten() for name in (".scale", ".zero"))
        mask = (1 << self.bits) - 1

        def dequantised(first: int, end: int) -> torch.Tensor:
            places = torch.arange(first * inputs, end * inputs, device=packed.device)
            row, column = places // packed.shape[1], places % packed.shape[1]
            shift = 8 - self.bits * (1 + row // len(packed))
            numbers = (packed[row % len(packed), column].int() >> shift) & mask
            of = row if self.axis == 1 else column
            return numbers.float().sub_(zeros[of]).mul_(scales[of]).view(end - first, inputs)

        return dequantised

    def keeps(self, shape: tuple[int, ...]) -> bool:
        neighbours = self.axis == 1 and shape[1] % (self.group or shape[1]) == 0
        return neighbours and self.bits != 2 and shape[1] % 2 == 0

    @property
    def layout(self) -> WeightLayout | None:
        if self.axis == 0 or self.bits == 2:
            return None
        return WeightLayout(f"int{self.bits}", self.group or 0, offsets=True)

    def kept(
        self, parts: Mapping[str, torch.Tensor], shape: tuple[int, ...], dtype: torch.dtype
    ) -> QuantisedWeight:
        _check_shape(parts, shape)
        outputs = shape[0]
        packed = parts[".W_q"]
        scales, zeros = (parts[name].view(outputs, -1) for name in (".scale", ".zero"))
        if self.bits == 4:
            # Bytes hold the first half of the rows of groups in their high bits. Numbers are paired
            # along a row of the matrix, since a group's size may be odd.
            numbers = paired(torch.cat((packed >> 4, packed & 15)).view(outputs, -1))
            offsets = -(zeros.float() * scales.float())
        else:
            # Numbers with a sign are smaller by 128.
            numbers = (packed ^ 128).view(torch.int8)
            offsets = (128 - zeros.float()) * scales.float()
        return QuantisedWeight(numbers.view(outputs, -1), scales, offsets, dtype)

    def _grouped(self, shape: tuple[int, ...]) -> tuple[int, int]:
        if self.group is None:
            return shape[0], shape[1]
        groups, left = divmod(shape[0] * shape[1], self.group)
        if left:
            raise ValueError(f"{shape[0] * shape[1]} numbers: must divide by {self.group}")
        return (groups, self.group) if self.axis == 1 else (self.group, groups)


def _check_shape(parts: Mapping[str, torch.Tensor], shape: tuple[int, ...]) -> None:
    stored = parts.get(".shape")
    if stored is not None and stored.tolist() != list(shape):
        raise BadPart(".shape", f"holds {stored.tolist()}, not {list(shape)}")
