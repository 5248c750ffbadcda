"""The quantised types of GGUF files: blocks of numbers with scales, and the values they encode.

A type is described once, for torch's operators here and for LLVM's code in
`asyncinfer.kernels.native`; the `gguf` package is the oracle of both in tests.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Final, Literal, TypeAlias

import torch

from asyncinfer.kernels.codes import TABLES

__all__ = ["BLOCK_TYPES", "BlockType", "Parts", "Plane", "block_floats", "block_parts"]

#: The numbers of blocks as a `QuantisedWeight` has them, their float scales, and their float
#: offsets or None: `[blocks, ...]` each.
Parts: TypeAlias = "tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]"
#: How a block holds its scales; each has a function below.
Scales = Literal["half", "halves", "exponent", "k", "q2", "q3", "q6", "xs"]


@dataclass(frozen=True, slots=True)
class Plane:
    """Some bits of each number of a block. The first `run` numbers are in the lowest bits of `run`
    bytes, the next ones in the next bits of the same bytes, and so on. Then come the next `run`
    bytes.
    """

    #: The byte of a block at which the plane begins.
    start: int
    #: Bits of a number: 1, 2, 4 or 8.
    bits: int
    run: int


@dataclass(frozen=True, slots=True)
class BlockType:
    """A type of blocks: `value * scale + offset` for each number."""

    #: Numbers in a block.
    numbers: int
    #: Bytes of a block.
    size: int
    #: Numbers that share a scale.
    group: int
    #: The planes of the numbers' lowest bits, then those of higher ones.
    planes: tuple[Plane, ...]
    scales: Scales
    #: The byte at which a block's own scale begins, and after it the block's minimum if it has one
    #: (ggml's d and dmin).
    at: int
    #: Subtracted from each number.
    less: int = 0
    #: What a number stands for: "int", itself, with a sign if it has 8 bits; else a code of
    #: `TABLES`.
    code: str = "int"

    @property
    def bits(self) -> int:
        """Bits of a number."""
        return sum(plane.bits for plane in self.planes)


_NIBBLES: Final = 16
#: By ggml's name in small letters.
BLOCK_TYPES: Final[Mapping[str, BlockType]] = MappingProxyType(
    {
        "q4_0": BlockType(32, 18, 32, (Plane(2, 4, _NIBBLES),), "half", 0, less=8),
        "q4_1": BlockType(32, 20, 32, (Plane(4, 4, _NIBBLES),), "halves", 0),
        "q5_0": BlockType(32, 22, 32, (Plane(6, 4, _NIBBLES), Plane(2, 1, 1)), "half", 0, less=16),
        "q5_1": BlockType(32, 24, 32, (Plane(8, 4, _NIBBLES), Plane(4, 1, 1)), "halves", 0),
        "q8_0": BlockType(32, 34, 32, (Plane(2, 8, 32),), "half", 0),
        "q2_k": BlockType(256, 84, 16, (Plane(16, 2, 32),), "q2", 80),
        "q3_k": BlockType(256, 110, 16, (Plane(32, 2, 32), Plane(0, 1, 32)), "q3", 108, less=4),
        "q4_k": BlockType(256, 144, 32, (Plane(16, 4, 32),), "k", 0),
        "q5_k": BlockType(256, 176, 32, (Plane(48, 4, 32), Plane(16, 1, 32)), "k", 0),
        "q6_k": BlockType(256, 210, 16, (Plane(0, 4, 64), Plane(128, 2, 32)), "q6", 208, less=32),
        "iq4_nl": BlockType(32, 18, 32, (Plane(2, 4, _NIBBLES),), "half", 0, code="iq4"),
        "iq4_xs": BlockType(256, 136, 32, (Plane(8, 4, _NIBBLES),), "xs", 0, code="iq4"),
        "mxfp4": BlockType(32, 17, 32, (Plane(1, 4, _NIBBLES),), "exponent", 0, code="e2m1"),
    }
)


def block_parts(blocks: torch.Tensor, name: str) -> Parts:
    """The numbers, scales and offsets of the blocks uint8 `[blocks, size]` of a type. Numbers of at
    most 4 bits are two in a byte, the first in the low half. Numbers of more bits are int8."""
    kind = BLOCK_TYPES[name]
    numbers = _plane(blocks, kind.planes[0], kind.numbers)
    shift = kind.planes[0].bits
    for plane in kind.planes[1:]:
        numbers = numbers | _plane(blocks, plane, kind.numbers) << shift
        shift += plane.bits
    scales, offsets = _SCALES[kind.scales](blocks, kind.at)
    if kind.bits <= 4:
        numbers = numbers[:, 0::2] | numbers[:, 1::2] << 4
        return numbers, scales, -kind.less * scales if kind.less else offsets
    return numbers.view(torch.int8) - kind.less, scales, offsets


def block_floats(blocks: torch.Tensor, name: str) -> torch.Tensor:
    """The numbers of the blocks uint8 `[blocks, size]` as float32 `[blocks, numbers]`."""
    kind = BLOCK_TYPES[name]
    numbers, scales, offsets = block_parts(blocks, name)
    if numbers.dtype is torch.int8:
        floats = numbers.float()
    else:
        values = torch.tensor(
            TABLES["int4" if kind.code == "int" else kind.code], dtype=torch.float32
        )
        floats = values[torch.stack((numbers & 15, numbers >> 4), dim=-1).flatten(-2).int()]
    floats = floats.view(*scales.shape, -1).mul_(scales.float()[..., None])
    if offsets is not None:
        floats.add_(offsets.float()[..., None])
    return floats.flatten(1)


def _plane(blocks: torch.Tensor, plane: Plane, numbers: int) -> torch.Tensor:
    """The bits of a plane, uint8 `[blocks, numbers]`."""
    data = blocks[:, plane.start : plane.start + numbers * plane.bits // 8]
    if plane.bits == 8:
        return data.contiguous()
    runs = data.reshape(len(data), -1, plane.run)
    mask = (1 << plane.bits) - 1
    parts = [runs >> shift & mask for shift in range(0, 8, plane.bits)]
    # Bits of one byte lie side by side where a run is one byte.
    return torch.stack(parts, dim=2).flatten(1)


def _halves(blocks: torch.Tensor, at: int, count: int = 1) -> torch.Tensor:
    """float16 numbers of each block, `[blocks, count]`."""
    return blocks[:, at : at + 2 * count].contiguous().view(torch.float16)


def _half(blocks: torch.Tensor, at: int) -> tuple[torch.Tensor, None]:
    return _halves(blocks, at), None


def _scale_and_offset(blocks: torch.Tensor, at: int) -> tuple[torch.Tensor, torch.Tensor]:
    both = _halves(blocks, at, 2)
    return both[:, :1], both[:, 1:]


def _exponent(blocks: torch.Tensor, at: int) -> tuple[torch.Tensor, None]:
    """A power of two, biased by 127."""
    return torch.exp2(blocks[:, at : at + 1].float() - 127), None


def _k(blocks: torch.Tensor, at: int) -> tuple[torch.Tensor, torch.Tensor]:
    """`[blocks, 8]`: scales and offsets of 6 bits, times a float16 each."""
    both = _halves(blocks, at, 2).float()
    first, second, rest = torch.split(blocks[:, at + 4 : at + 16], 4, dim=1)
    scales = torch.cat((first & 63, rest & 15 | first >> 2 & 48), dim=1)
    offsets = torch.cat((second & 63, rest >> 4 | second >> 2 & 48), dim=1)
    return both[:, :1] * scales.float(), -both[:, 1:] * offsets.float()


def _q2(blocks: torch.Tensor, at: int) -> tuple[torch.Tensor, torch.Tensor]:
    """`[blocks, 16]`: a scale and an offset of 4 bits in each of the first bytes, times a float16
    each."""
    both, data = _halves(blocks, at, 2).float(), blocks[:, :16]
    return both[:, :1] * (data & 15).float(), -both[:, 1:] * (data >> 4).float()


def _q3(blocks: torch.Tensor, at: int) -> tuple[torch.Tensor, None]:
    """`[blocks, 16]`: scales of 6 bits less 32, their low and high bits apart, times a float16."""
    low, high = blocks[:, at - 12 : at - 4], blocks[:, at - 4 : at]
    lows = torch.cat((low & 15, low >> 4), dim=1)
    highs = torch.cat([high >> shift & 3 for shift in (0, 2, 4, 6)], dim=1)
    return _halves(blocks, at).float() * ((lows | highs << 4).float() - 32), None


def _q6(blocks: torch.Tensor, at: int) -> tuple[torch.Tensor, None]:
    """`[blocks, 16]`: scales of 8 bits, times a float16."""
    return _halves(blocks, at).float() * blocks[:, at - 16 : at].view(torch.int8).float(), None


def _xs(blocks: torch.Tensor, at: int) -> tuple[torch.Tensor, None]:
    """`[blocks, 8]`: scales of 6 bits less 32, their low and high bits apart, times a float16."""
    low, high = blocks[:, at + 4 : at + 8], blocks[:, at + 2 : at + 4]
    lows = torch.stack((low & 15, low >> 4), dim=-1).flatten(1)
    highs = torch.stack([high >> shift & 3 for shift in (0, 2, 4, 6)], dim=-1).flatten(1)
    return _halves(blocks, at).float() * ((lows | highs << 4).float() - 32), None


_SCALES: Final[
    Mapping[str, Callable[[torch.Tensor, int], tuple[torch.Tensor, torch.Tensor | None]]]
] = MappingProxyType(
    {
        "half": _half,
        "halves": _scale_and_offset,
        "exponent": _exponent,
        "k": _k,
        "q2": _q2,
        "q3": _q3,
        "q6": _q6,
        "xs": _xs,
    }
)
