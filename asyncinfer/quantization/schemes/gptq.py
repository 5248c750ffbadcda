"""Matrices in the layouts of GPTQ and AWQ, whose numbers are packed into int32 `[in, out]`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final

import torch

from asyncinfer.kernels.layouts import WeightLayout
from asyncinfer.kernels.orders import AWQ_PLACES, NumberOrder, as_bytes
from asyncinfer.quantization.schemes.bits import pairs, scaled, unpack
from asyncinfer.quantization.schemes.matrix import (
    HALVES,
    BadPart,
    GroupEnds,
    MatrixFormat,
    Part,
    Rows,
    StoredNumbers,
)
from asyncinfer.quantization.weight import QuantisedWeight

__all__ = ["AwqMatrix", "GptqMatrix"]

#: The place in a word of AWQ's first, second, ... output.
_AWQ_PLACES: Final = {4: AWQ_PLACES, 8: (0, 2, 1, 3)}
#: Outputs whose numbers are unpacked at a time.
_ROWS: Final = 512


@dataclass(frozen=True, slots=True)
class GptqMatrix(MatrixFormat):
    """`(number - zero) * scale`: `qweight` packed along the inputs, `qzeros` along the outputs.

    The first version of the format (Frantar et al., 2022, as AutoGPTQ saves it) stores each zero
    point less one, the second stores it as it is."""

    bits: int
    #: Inputs that share a scale; None: all.
    group: int | None
    #: Whether inputs were ordered by activation, so that only `g_idx` says their groups.
    reordered: bool = False
    second_version: bool = False

    def parts(self, shape: tuple[int, ...]) -> tuple[Part, ...]:
        outputs, inputs = shape
        groups = _groups(self.group, inputs)
        words = _words(self.bits, outputs, inputs)
        return (
            Part((".qweight",), ((words[1], outputs),), ("I32",)),
            Part((".qzeros",), ((groups, words[0]),), ("I32",)),
            Part((".scales",), ((groups, outputs),), HALVES),
            Part((".g_idx",), ((inputs,),), ("I32", "I64"), optional=not self.reordered),
        )

    def rows(self, parts: Mapping[str, torch.Tensor], shape: tuple[int, ...]) -> Rows:
        numbers, scales = parts[".qweight"], parts[".scales"].float()
        zeros = self._zeros(parts)
        group: torch.Tensor | None = self._group(parts, shape[1])
        if self._in_order(parts, shape[1]):
            group = None

        def dequantised(first: int, end: int) -> torch.Tensor:
            floats = unpack(numbers[:, first:end].t(), self.bits).float()
            zero, scale = zeros[:, first:end].t().float(), scales[:, first:end].t()
            return scaled(floats, zero, scale, group)

        return dequantised

    def keeps(self, shape: tuple[int, ...]) -> bool:
        # Reordered inputs may still be neighbours, as `g_idx` shows; then `kept` holds them.
        return self.bits != 2 and shape[1] % (self.group or shape[1]) == 0

    @property
    def layout(self) -> WeightLayout | None:
        if self.bits == 2:
            return None
        return WeightLayout(f"int{self.bits}", self.group or 0, offsets=True)

    def numbers(self, shape: tuple[int, ...]) -> StoredNumbers | None:
        return StoredNumbers(".qweight", f"int{self.bits}", NumberOrder("words", _flip(self.bits)))

    def ends(self, parts: Mapping[str, torch.Tensor], shape: tuple[int, ...]) -> GroupEnds | None:
        if not self._in_order(parts, shape[1]):
            return None
        if self.bits == 4:
            # As in `_zeros`.
            values = range(16) if self.second_version else (*range(1, 16), 0)
            below = _negative(values, parts[".qzeros"])
        else:
            below = self._zeros(parts).float().sub_(128).neg_()
        return _ends(below, parts[".scales"])

    def _zeros(self, parts: Mapping[str, torch.Tensor]) -> torch.Tensor:
        """The zero points, uint8 `[groups, out]`."""
        zeros = unpack(parts[".qzeros"], self.bits)
        # The sum wraps: a zero point of zero is stored as the largest number.
        return zeros if self.second_version else (zeros + 1) & ((1 << self.bits) - 1)

    def _group(self, parts: Mapping[str, torch.Tensor], inputs: int) -> torch.Tensor:
        """The group of each input."""
        group, most = parts.get(".g_idx"), len(parts[".scales"]) - 1
        if group is None:
            return self._neighbours(inputs, parts[".scales"].device)
        if int(group.min()) < 0 or int(group.max()) > most:
            raise BadPart(".g_idx", f"must be from 0 to {most}")
        return group.long()

    def _in_order(self, parts: Mapping[str, torch.Tensor], inputs: int) -> bool:
        """Whether equal parts of neighbours share a scale."""
        group = self._group(parts, inputs)
        whole = inputs % (self.group or inputs) == 0
        return whole and torch.equal(group, self._neighbours(inputs, group.device))

    def _neighbours(self, inputs: int, device: torch.device) -> torch.Tensor:
        return torch.arange(inputs, device=device) // (self.group or inputs)


@dataclass(frozen=True, slots=True)
class AwqMatrix(MatrixFormat):
    """`(number - zero) * scale` (Lin et al., 2023): the "gemm" layout, in which `qweight` and
    `qzeros` are packed along the outputs, the even ones of a word before the odd ones."""

    bits: int
    #: Inputs that share a scale; None: all.
    group: int | None
    #: Whether there are zero points; else each is half the range.
    zero_point: bool = True

    def parts(self, shape: tuple[int, ...]) -> tuple[Part, ...]:
        outputs, inputs = shape
        groups = _groups(self.group, inputs)
        words = _words(self.bits, outputs, inputs)[0]
        zeros = Part((".qzeros",), ((groups, words),), ("I32",), optional=not self.zero_point)
        return (
            Part((".qweight",), ((inputs, words),), ("I32",)),
            zeros,
            Part((".scales",), ((groups, outputs),), HALVES),
        )

    def rows(self, parts: Mapping[str, torch.Tensor], shape: tuple[int, ...]) -> Rows:
        inputs, outputs = shape[1], self._outputs
        numbers, scales = parts[".qweight"], parts[".scales"].float()
        zeros = parts.get(".qzeros")
        group = None
        if inputs % (self.group or inputs):
            group = torch.arange(inputs, device=numbers.device) // (self.group or inputs)

        def dequantised(first: int, end: int) -> torch.Tensor:
            floats, scale = outputs(numbers, first, end).float(), scales[:, first:end].t()
            if zeros is None:
                zero = torch.full_like(scale, 1 << (self.bits - 1))
            else:
                zero = outputs(zeros, first, end).float()
            return scaled(floats.contiguous(), zero, scale, group)

        return dequantised

    def keeps(self, shape: tuple[int, ...]) -> bool:
        return shape[1] % (self.group or shape[1]) == 0

    @property
    def layout(self) -> WeightLayout | None:
        return WeightLayout(f"int{self.bits}", self.group or 0, offsets=True)

    def numbers(self, shape: tuple[int, ...]) -> StoredNumbers | None:
        return StoredNumbers(".qweight", "int4", NumberOrder("awq")) if self.bits == 4 else None

    def ends(self, parts: Mapping[str, torch.Tensor], shape: tuple[int, ...]) -> GroupEnds | None:
        scales, stored = parts[".scales"], parts.get(".qzeros")
        if stored is None:
            value = -8.0 if self.bits == 4 else 0.0
            below = torch.full_like(scales, value, dtype=torch.float32)
        elif self.bits == 4:
            below = _negative(range(16), stored)
            places = torch.tensor(AWQ_PLACES, device=below.device)
            below = below.view(-1, len(places)).index_select(1, places).view(scales.shape)
        else:
            below = self._outputs(stored, 0, shape[0]).t().float().sub_(128).neg_()
        return _ends(below, scales)

    def kept(
        self, parts: Mapping[str, torch.Tensor], shape: tuple[int, ...], dtype: torch.dtype
    ) -> QuantisedWeight | None:
        if self.bits == 4:
            return super(AwqMatrix, self).kept(parts, shape, dtype)
        ends = self.ends(parts, shape)
        assert ends is not None
        numbers = torch.empty(shape, dtype=torch.uint8, device=ends.scales.device)
        for first in range(0, shape[0], _ROWS):
            end = min(first + _ROWS, shape[0])
            numbers[first:end] = self._outputs(parts[".qweight"], first, end) ^ _flip(8)
        return QuantisedWeight(numbers.view(torch.int8), *ends.apart(), dtype)

    def _outputs(self, packed: torch.Tensor, first: int, end: int) -> torch.Tensor:
        """Numbers of some outputs, uint8 `[outputs, inputs or groups]`."""
        each, mask = 32 // self.bits, (1 << self.bits) - 1
        start = first // each
        words = packed[:, start : -(-end // each)].t().contiguous()
        numbers = [
            (words >> (self.bits * place)).bitwise_and_(mask).to(torch.uint8)
            for place in _AWQ_PLACES[self.bits]
        ]
        return torch.stack(numbers, dim=1).flatten(0, 1)[first - start * each : end - start * each]


def _flip(bits: int) -> int:
    """The bits of a byte to flip, so that unsigned numbers become signed."""
    return 128 if bits == 8 else 0


def _negative(values: Sequence[int], packed: torch.Tensor) -> torch.Tensor:
    """The values of 4-bit numbers in int32 `[groups, words]`, times -1: float32."""
    return pairs([-float(value) for value in values], as_bytes(packed), high_first=False)


def _ends(below: torch.Tensor, scales: torch.Tensor) -> GroupEnds:
    """The ends for `(number + below) * scale`; `below`, which is overwritten, and scales are
    `[groups, out]`."""
    return GroupEnds(scales.t(), below.mul_(scales).t())


def _groups(group: int | None, inputs: int) -> int:
    return 1 if group is None else -(-inputs // group)


def _words(bits: int, outputs: int, inputs: int) -> tuple[int, int]:
    """How many int32 hold a number for each output, and for each input."""
    each = 32 // bits
    if outputs % each or inputs % each:
        raise ValueError(f"{outputs} outputs and {inputs} inputs: must divide by {each}")
    return outputs // each, inputs // each
