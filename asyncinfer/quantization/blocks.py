"""`BlockWeight`: a matrix in the blocks of a GGUF file."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Self

import torch

from asyncinfer.kernels.block_types import BLOCK_TYPES, block_floats, block_parts
from asyncinfer.kernels.layouts import WeightLayout
from asyncinfer.quantization.packed_weight import WeightOfBlocks
from asyncinfer.quantization.weight import QuantisedWeight

__all__ = ["BlockWeight", "block_layout"]

#: Numbers of a matrix that are converted at a time, so that no whole float32 copy ever exists.
_PART = 1 << 20


@dataclass(frozen=True, slots=True, eq=False)
class BlockWeight(WeightOfBlocks):
    """A weight `[..., out, in]` in blocks of one of `BLOCK_TYPES`, byte for byte as in the file:
    nothing is rounded, and loading is reading."""

    #: uint8 `[..., out, bytes]`: the blocks of each row.
    blocks: torch.Tensor
    code: str
    dtype: torch.dtype

    def __post_init__(self) -> None:
        assert self.blocks.dtype is torch.uint8
        assert self.blocks.shape[-1] % BLOCK_TYPES[self.code].size == 0

    @classmethod
    def cat(cls, parts: Sequence[Self]) -> Self:
        """Rows of weights of one code below each other."""
        if len(parts) == 1:
            return parts[0]
        assert len({part.code for part in parts}) == 1
        return replace(parts[0], blocks=torch.cat([part.blocks for part in parts]))

    @property
    def inputs(self) -> int:
        kind = BLOCK_TYPES[self.code]
        return self.blocks.shape[-1] // kind.size * kind.numbers

    @property
    def shape(self) -> tuple[int, ...]:
        return (*self.blocks.shape[:-1], self.inputs)

    def view(self, *leading: int) -> Self:
        return self._each(lambda blocks: blocks.reshape(*leading, blocks.shape[-1]))

    def grouped(self) -> QuantisedWeight:
        """The same weight with separate numbers, scales and offsets."""
        rows, size = self.blocks.shape[:-1], BLOCK_TYPES[self.code].size
        numbers, scales, offsets = (
            None if part is None else part.reshape(*rows, -1)
            for part in block_parts(self.blocks.reshape(-1, size), self.code)
        )
        assert numbers is not None
        assert scales is not None
        return QuantisedWeight(numbers, scales, offsets, self.dtype, BLOCK_TYPES[self.code].code)

    def dequantised(self, dtype: torch.dtype | None = None) -> torch.Tensor:
        whole = torch.empty(self.shape, dtype=dtype or self.dtype, device=self.device)
        size = BLOCK_TYPES[self.code].size
        flat, blocks = whole.view(-1, self.inputs), self.blocks.flatten(0, -2)
        step = max(1, _PART // self.inputs)
        for start in range(0, len(flat), step):
            part = blocks[start : start + step]
            floats = block_floats(part.reshape(-1, size), self.code)
            flat[start : start + step] = floats.view(len(part), -1)
        return whole

    def _each(self, change: Callable[[torch.Tensor], torch.Tensor]) -> Self:
        return replace(self, blocks=change(self.blocks))


def block_layout(code: str) -> WeightLayout:
    """The layout of a block type in the form of `grouped`."""
    two = torch.zeros(1, 2 * BLOCK_TYPES[code].size, dtype=torch.uint8)
    return BlockWeight(two, code, torch.float32).grouped().layout
