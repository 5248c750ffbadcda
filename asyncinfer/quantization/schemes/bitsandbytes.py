"""Matrices of bitsandbytes' 4-bit types (Dettmers et al., QLoRA, 2023)."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

import torch

from asyncinfer.kernels.codes import TABLES
from asyncinfer.kernels.layouts import WeightLayout
from asyncinfer.kernels.orders import NumberOrder
from asyncinfer.quantization.schemes.bits import pairs
from asyncinfer.quantization.schemes.matrix import (
    BadPart,
    GroupEnds,
    MatrixFormat,
    Part,
    Rows,
    StoredNumbers,
)
from asyncinfer.quantization.weight import QuantisedWeight

__all__ = ["Bnb4Matrix"]

#: How many numbers may share a scale, the usual one first; and how many scales share a scale of
#: their own.
_BLOCKS: Final = (64, 32, 128, 256, 512, 1024, 2048, 4096)
_NESTED_BLOCK: Final = 256
_STATE: Final = ".weight.quant_state.bitsandbytes__"


@dataclass(frozen=True, slots=True)
class Bnb4Matrix(MatrixFormat):
    """Numbers of four bits that index a table of sixteen values, the first of a byte in its high
    bits, times the largest magnitude of each block: a float, or in double quantisation a byte that
    indexes a table of 256 values."""

    #: "nf4" or "fp4".
    kind: str
    double: bool = False

    def parts(self, shape: tuple[int, ...]) -> tuple[Part, ...]:
        numbers = shape[0] * shape[1]
        if numbers % 2:
            raise ValueError(f"{numbers} numbers: must be even")
        blocks = tuple(-(-numbers // block) for block in _BLOCKS)
        stored = tuple((-(-numbers // (2 * size)), 1) for size in (1, 2, 4))
        flat = tuple((size,) for size in blocks)
        parts = (
            Part((".weight",), stored, ("U8", "F16", "BF16", "F32", "I8")),
            Part((".weight.absmax",), flat, ("U8",) if self.double else ("F32",)),
            Part((".weight.quant_map",), ((16,),), ("F32",)),
            Part((_STATE + self.kind,), (), ("U8",)),
        )
        if not self.double:
            return parts
        nested = tuple((-(-size // _NESTED_BLOCK),) for size in blocks)
        return (
            *parts,
            Part((".weight.nested_absmax",), nested, ("F32",)),
            Part((".weight.nested_quant_map",), ((256,),), ("F32",)),
        )

    def rows(self, parts: Mapping[str, torch.Tensor], shape: tuple[int, ...]) -> Rows:
        inputs = shape[1]
        packed, (largest, block) = self._packed(parts, shape), self._blocks(parts, shape)
        table = parts[".weight.quant_map"].tolist()

        def dequantised(first: int, end: int) -> torch.Tensor:
            start, stop = first * inputs, end * inputs
            floats = pairs(table, packed[start // 2 : -(-stop // 2)], high_first=True)
            floats = floats[start % 2 :][: stop - start]
            of = torch.arange(start, stop, device=floats.device) // block
            return floats.mul_(largest[of]).view(end - first, inputs)

        return dequantised

    def keeps(self, shape: tuple[int, ...]) -> bool:
        return shape[1] % min(_BLOCKS) == 0

    @property
    def layout(self) -> WeightLayout | None:
        return WeightLayout(self.kind, _BLOCKS[0])

    def numbers(self, shape: tuple[int, ...]) -> StoredNumbers | None:
        # The first of two numbers is in the high bits.
        return StoredNumbers(".weight", self.kind, NumberOrder(swapped=True))

    def ends(self, parts: Mapping[str, torch.Tensor], shape: tuple[int, ...]) -> GroupEnds | None:
        largest, block = self._blocks(parts, shape)
        table = torch.tensor(TABLES[self.kind], device=largest.device, dtype=torch.float32)
        if shape[1] % block or not torch.equal(parts[".weight.quant_map"], table):
            return None
        return GroupEnds(largest.view(shape[0], -1))

    def kept(
        self, parts: Mapping[str, torch.Tensor], shape: tuple[int, ...], dtype: torch.dtype
    ) -> QuantisedWeight | None:
        self._packed(parts, shape)
        return super(Bnb4Matrix, self).kept(parts, shape, dtype)

    def _packed(self, parts: Mapping[str, torch.Tensor], shape: tuple[int, ...]) -> torch.Tensor:
        """The bytes of all numbers."""
        packed, numbers = parts[".weight"].view(torch.uint8).flatten(), shape[0] * shape[1]
        if len(packed) * 2 != numbers:
            raise BadPart(".weight", f"holds {len(packed)} bytes, not {numbers // 2}")
        return packed

    def _blocks(
        self, parts: Mapping[str, torch.Tensor], shape: tuple[int, ...]
    ) -> tuple[torch.Tensor, int]:
        """The scale of each block as float32, and a block's size."""
        outputs, inputs = shape
        state = self._state(parts[_STATE + self.kind], shape)
        largest = parts[".weight.absmax"]
        block = state["blocksize"]
        if len(largest) != -(-outputs * inputs // block):
            why = f"{len(largest)} scales: the blocks of {block} numbers are "
            raise BadPart(".weight.absmax", f"{why}{-(-outputs * inputs // block)}")
        if self.double:
            largest = self._scales(largest, parts, state)
        return largest, block

    def _scales(
        self, numbers: torch.Tensor, parts: Mapping[str, torch.Tensor], state: dict[str, Any]
    ) -> torch.Tensor:
        """The blocks' scales, dequantised: float32."""
        nested = parts[".weight.nested_absmax"]
        if len(nested) != -(-len(numbers) // _NESTED_BLOCK):
            raise BadPart(".weight.nested_absmax", f"{len(nested)} scales for {len(numbers)}")
        of = torch.arange(len(numbers), device=numbers.device) // _NESTED_BLOCK
        floats = parts[".weight.nested_quant_map"][numbers.int()].mul_(nested[of])
        return floats.add_(state["nested_offset"])

    def _state(self, stored: torch.Tensor, shape: tuple[int, ...]) -> dict[str, Any]:
        """The JSON object that says how this matrix was quantised."""
        part = _STATE + self.kind
        if stored.numel() > 4096:
            raise BadPart(part, f"{stored.numel()} bytes, more than 4096")
        try:
            state = json.loads(bytes(stored.flatten().tolist()))
        except (ValueError, RecursionError):
            raise BadPart(part, "is not a JSON object") from None
        if not isinstance(state, dict):
            raise BadPart(part, "is not a JSON object")
        wanted: dict[str, tuple[Any, ...]] = {"quant_type": (self.kind,), "shape": (list(shape),)}
        wanted["blocksize"] = _BLOCKS
        if self.double:
            wanted["nested_blocksize"] = (_NESTED_BLOCK,)
        for key, values in wanted.items():
            # 64.0 is equal to 64.
            if state.get(key) not in values or isinstance(state[key], float):
                raise BadPart(part, f"{key}={state.get(key)!r:.40}: must be {values!r}")
        offset = state.get("nested_offset")
        if self.double and not (isinstance(offset, float) and abs(offset) < torch.inf):
            raise BadPart(part, f"nested_offset={offset!r:.40}: must be a finite number")
        return state
