"""Matrices of whole numbers as compressed-tensors stores them, and bitsandbytes' of 8 bits."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch

from asyncinfer.kernels.layouts import WeightLayout
from asyncinfer.kernels.orders import NumberOrder
from asyncinfer.quantization.schemes.bits import scaled, unpack
from asyncinfer.quantization.schemes.matrix import (
    FLOATS,
    HALVES,
    BadPart,
    GroupEnds,
    MatrixFormat,
    Part,
    Rows,
    StoredNumbers,
)

__all__ = ["IntMatrix", "RowInt8Matrix"]


@dataclass(frozen=True, slots=True)
class IntMatrix(MatrixFormat):
    """`(number - zero) * scale`, in the layout of compressed-tensors: signed bytes, or packed into
    int32 with `2 ** (bits - 1)` added."""

    bits: int
    #: Inputs that share a scale; None: all of an output.
    group: int | None
    #: One scale for the whole matrix.
    whole: bool = False
    symmetric: bool = True
    #: Whether inputs say by `weight_g_idx` which group they belong to.
    reordered: bool = False
    packed: bool = True

    def parts(self, shape: tuple[int, ...]) -> tuple[Part, ...]:
        outputs, inputs = shape
        groups = 1 if self.group is None else -(-inputs // self.group)
        words = -(-inputs * self.bits // 32)
        scales: tuple[tuple[int, ...], ...] = ((outputs, groups),)
        if self.whole:
            scales = ((), (1,), (1, 1))
        elif self.group is None:
            scales = ((outputs, 1), (outputs,))
        parts = [
            Part((".weight_packed",), ((outputs, words),), ("I32",))
            if self.packed
            else Part((".weight",), (shape,), ("I8",)),
            Part((".weight_scale",), scales, HALVES),
        ]
        if self.packed:
            parts.append(Part((".weight_shape",), ((2,),), ("I64", "I32")))
        if not self.symmetric:
            zeros = ((-(-outputs * self.bits // 32), groups), *scales)
            parts.append(Part((".weight_zero_point",), zeros, ("I32", "I8", "I64")))
        if self.reordered:
            parts.append(Part((".weight_g_idx",), ((inputs,),), ("I32", "I64")))
        # Neither is used: activations keep the model's dtype, and a symmetric matrix's zero is 0.
        names = (".input_scale", ".input_zero_point", ".output_scale")
        parts += [Part((name,), (), (*FLOATS, "I8"), optional=True, unread=True) for name in names]
        if self.symmetric:
            zero = (".weight_zero_point",)
            parts.append(Part(zero, (), ("I32", "I8", "I64"), optional=True, unread=True))
        return tuple(parts)

    def rows(self, parts: Mapping[str, torch.Tensor], shape: tuple[int, ...]) -> Rows:
        inputs = shape[1]
        _check_shape(parts, shape)
        numbers = parts[".weight_packed" if self.packed else ".weight"]
        half = 1 << (self.bits - 1) if self.packed else 0
        scales = self._scales(parts, shape[0]).float()
        zeros = None if self.symmetric else self._zeros(parts[".weight_zero_point"], scales)
        group = self._group(parts.get(".weight_g_idx"), inputs, scales)

        def dequantised(first: int, end: int) -> torch.Tensor:
            part = numbers[first:end]
            floats = (unpack(part, self.bits)[:, :inputs] if self.packed else part).float()
            if half:
                floats.sub_(half)
            zero = None if zeros is None else zeros[first:end]
            return scaled(floats.contiguous(), zero, scales[first:end], group)

        return dequantised

    def keeps(self, shape: tuple[int, ...]) -> bool:
        bits, inputs = self.bits if self.packed else 8, shape[1]
        whole = inputs % 2 == 0 and inputs % (self.group or inputs) == 0
        return whole and bits != 2 and not self.reordered

    @property
    def layout(self) -> WeightLayout | None:
        bits = self.bits if self.packed else 8
        if bits == 2 or self.reordered:
            return None
        return WeightLayout(f"int{bits}", self.group or 0, bits == 4 or not self.symmetric)

    def numbers(self, shape: tuple[int, ...]) -> StoredNumbers | None:
        if not self.packed:
            return StoredNumbers(".weight", "int8")
        # 8-bit numbers become signed by subtracting 128, which flips the highest bit.
        order = NumberOrder(flip=128 if self.bits == 8 else 0)
        return StoredNumbers(".weight_packed", f"int{self.bits}", order)

    def ends(self, parts: Mapping[str, torch.Tensor], shape: tuple[int, ...]) -> GroupEnds | None:
        _check_shape(parts, shape)
        scales = self._scales(parts, shape[0]).contiguous()
        offsets = None
        if not self.symmetric:
            offsets = self._zeros(parts[".weight_zero_point"], scales)
        half = 8 if self.packed and self.bits == 4 else 0
        if offsets is None:
            return GroupEnds(scales, scales.float() * -half if half else None)
        return GroupEnds(scales, offsets.add_(half).mul_(scales.float()).neg_())

    def _scales(self, parts: Mapping[str, torch.Tensor], outputs: int) -> torch.Tensor:
        """The scales, `[out, groups]`."""
        scales = parts[".weight_scale"]
        return scales.reshape(1, 1).expand(outputs, 1) if self.whole else scales.view(outputs, -1)

    def _zeros(self, stored: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
        """The zero point of each scale, as float32."""
        outputs, groups = scales.shape
        plain = stored.dtype is not torch.int32 or self.whole
        fits = stored.numel() == (1 if self.whole else outputs * groups)
        if not (fits if plain else stored.shape == (-(-outputs * self.bits // 32), groups)):
            kind = str(stored.dtype).removeprefix("torch.")
            raise BadPart(".weight_zero_point", f"shape {list(stored.shape)} is not that of {kind}")
        if plain:
            return stored.reshape(-1, groups).expand(outputs, groups).float()
        # Zero points are packed along the outputs.
        numbers = unpack(stored.t(), self.bits)[:, :outputs].t()
        return numbers.float().sub_(1 << (self.bits - 1))

    def _group(
        self, index: torch.Tensor | None, inputs: int, scales: torch.Tensor
    ) -> torch.Tensor | None:
        """The group of each input; None: neighbours share one."""
        groups = scales.shape[1]
        if index is not None:
            if int(index.min()) < 0 or int(index.max()) >= groups:
                raise BadPart(".weight_g_idx", f"must be from 0 to {groups - 1}")
            return index.long()
        if self.group is None or inputs % self.group == 0:
            return None
        return torch.arange(inputs, device=scales.device) // self.group


def _check_shape(parts: Mapping[str, torch.Tensor], shape: tuple[int, ...]) -> None:
    stored = parts.get(".weight_shape")
    if stored is not None and stored.tolist() != list(shape):
        raise BadPart(".weight_shape", f"holds {stored.tolist()}, not {list(shape)}")


@dataclass(frozen=True, slots=True)
class RowInt8Matrix(MatrixFormat):
    """bitsandbytes' LLM.int8: signed bytes, and the largest magnitude of each output in `SCB`."""

    def parts(self, shape: tuple[int, ...]) -> tuple[Part, ...]:
        return (
            Part((".weight",), (shape,), ("I8",)),
            Part((".SCB",), ((shape[0],),), FLOATS),
            Part((".weight_format",), ((), (1,)), ("U8", "I8"), optional=True),
        )

    def rows(self, parts: Mapping[str, torch.Tensor], shape: tuple[int, ...]) -> Rows:
        numbers, scales = parts[".weight"], self._scales(parts)
        return lambda first, end: numbers[first:end].float().mul_(scales[first:end])

    def keeps(self, shape: tuple[int, ...]) -> bool:
        return True

    @property
    def layout(self) -> WeightLayout | None:
        return WeightLayout("int8", 0)

    def numbers(self, shape: tuple[int, ...]) -> StoredNumbers | None:
        return StoredNumbers(".weight", "int8")

    def ends(self, parts: Mapping[str, torch.Tensor], shape: tuple[int, ...]) -> GroupEnds | None:
        return GroupEnds(self._scales(parts))

    def _scales(self, parts: Mapping[str, torch.Tensor]) -> torch.Tensor:
        """The scale of each output, `[out, 1]`."""
        format = parts.get(".weight_format")
        if format is not None and format.any():
            # Older releases saved a model that had computed in the order of a GPU's products.
            raise BadPart(".weight_format", f"is {int(format)}: must be 0, which stands for rows")
        return parts[".SCB"].float().div(127)[:, None]
