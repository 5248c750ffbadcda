"""The types of GGUF tensors whose numbers stay in 4 or 8 bits, and how their blocks are laid out.

Each function takes the blocks of a type, uint8 `[blocks, bytes]`, apart: into numbers, scales and
offsets as `QuantisedWeight` has them, `[blocks, ...]`. The `gguf` package is the oracle in tests.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Final

import torch
from gguf import GGML_QUANT_SIZES, GGMLQuantizationType

__all__ = ["PACKED_TYPES", "PackedType"]

Parts = tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]


@dataclass(frozen=True, slots=True)
class PackedType:
    """A type whose tensors stay packed."""

    kind: GGMLQuantizationType
    #: Bits of a number: 4 or 8.
    bits: int
    #: How many numbers share a scale.
    group: int
    split: Callable[[torch.Tensor], Parts]
    #: What a number stands for, as a `QuantisedWeight` names it.
    code: str = "int"

    @property
    def block(self) -> int:
        """Numbers in a block."""
        return GGML_QUANT_SIZES[self.kind][0]

    @property
    def block_bytes(self) -> int:
        """Bytes of a block in a file."""
        return GGML_QUANT_SIZES[self.kind][1]


def _q4_0(blocks: torch.Tensor) -> Parts:
    scales = _halves(blocks[:, :2])
    return _pairs(_nibbles(blocks[:, 2:], 16)), scales, -8 * scales


def _q4_1(blocks: torch.Tensor) -> Parts:
    return _pairs(_nibbles(blocks[:, 4:], 16)), _halves(blocks[:, :2]), _halves(blocks[:, 2:4])


def _q5_0(blocks: torch.Tensor) -> Parts:
    numbers = _nibbles(blocks[:, 6:], 16) | _bits(blocks[:, 2:6]) << 4
    return _signed(numbers, 16), _halves(blocks[:, :2]), None


def _q5_1(blocks: torch.Tensor) -> Parts:
    numbers = _nibbles(blocks[:, 8:], 16) | _bits(blocks[:, 4:8]) << 4
    return _signed(numbers, 0), _halves(blocks[:, :2]), _halves(blocks[:, 2:4])


def _q8_0(blocks: torch.Tensor) -> Parts:
    return blocks[:, 2:].view(torch.int8), _halves(blocks[:, :2]), None


def _q4_k(blocks: torch.Tensor) -> Parts:
    return _pairs(_nibbles(blocks[:, 16:], 32)), *_k_scales(blocks)


def _q5_k(blocks: torch.Tensor) -> Parts:
    high = _planes(blocks[:, 16:48], 1, 32)
    numbers = _nibbles(blocks[:, 48:], 32) | high << 4
    return _signed(numbers, 0), *_k_scales(blocks)


def _q6_k(blocks: torch.Tensor) -> Parts:
    low, high = _nibbles(blocks[:, :128], 64), _planes(blocks[:, 128:192], 2, 32)
    scales = _halves(blocks[:, 208:]).float() * blocks[:, 192:208].view(torch.int8).float()
    return _signed(low | high << 4, 32), scales, None


def _iq4_nl(blocks: torch.Tensor) -> Parts:
    return _pairs(_nibbles(blocks[:, 2:], 16)), _halves(blocks[:, :2]), None


def _iq4_xs(blocks: torch.Tensor) -> Parts:
    low = torch.stack((blocks[:, 4:8] & 15, blocks[:, 4:8] >> 4), dim=-1).flatten(1)
    high = torch.stack([blocks[:, 2:4] >> shift & 3 for shift in (0, 2, 4, 6)], dim=-1).flatten(1)
    scales = _halves(blocks[:, :2]).float() * ((low | high << 4).float() - 32)
    return _pairs(_nibbles(blocks[:, 8:], 16)), scales, None


def _mxfp4(blocks: torch.Tensor) -> Parts:
    exponents = blocks[:, :1].float() - 127
    return _pairs(_nibbles(blocks[:, 1:], 16)), torch.exp2(exponents), None


def _k_scales(blocks: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """float32 `[blocks, 8]`: scales and offsets of 6 bits, times a float16 each, of Q4_K and
    Q5_K."""
    scale, least = _halves(blocks[:, 0:2]).float(), _halves(blocks[:, 2:4]).float()
    first, second, rest = blocks[:, 4:8], blocks[:, 8:12], blocks[:, 12:16]
    scales = torch.cat((first & 63, rest & 15 | first >> 2 & 48), dim=1)
    offsets = torch.cat((second & 63, rest >> 4 | second >> 2 & 48), dim=1)
    return scale * scales.float(), -least * offsets.float()


def _halves(two: torch.Tensor) -> torch.Tensor:
    """Bytes `[n, 2]` as float16 `[n, 1]`."""
    return two.contiguous().view(torch.float16)


def _nibbles(data: torch.Tensor, run: int) -> torch.Tensor:
    """Numbers of 4 bits in order: the low halves of `run` bytes are followed by their high ones."""
    runs = data.reshape(len(data), -1, run)
    return torch.stack((runs & 15, runs >> 4), dim=2).flatten(1)


def _planes(data: torch.Tensor, width: int, run: int) -> torch.Tensor:
    """Numbers of `width` bits in order: the lowest bits of `run` bytes, the next ones, ..."""
    runs = data.reshape(len(data), -1, run)
    mask = (1 << width) - 1
    return torch.stack([runs >> shift & mask for shift in range(0, 8, width)], dim=2).flatten(1)


def _bits(data: torch.Tensor) -> torch.Tensor:
    """Bits in order, the lowest of each byte first: `[n, bytes]` to `[n, 8 bytes]`."""
    return torch.stack([data >> shift & 1 for shift in range(8)], dim=-1).flatten(1)


def _pairs(numbers: torch.Tensor) -> torch.Tensor:
    """Numbers of 4 bits, two a byte."""
    return numbers[:, 0::2] | numbers[:, 1::2] << 4


def _signed(numbers: torch.Tensor, less: int) -> torch.Tensor:
    """uint8 below 128 as int8, less a number."""
    return numbers.view(torch.int8) - less


_K = GGMLQuantizationType
#: Tensors of any other type become floats as they are read.
PACKED_TYPES: Final[Mapping[GGMLQuantizationType, PackedType]] = MappingProxyType(
    {
        found.kind: found
        for found in (
            PackedType(_K.Q4_0, 4, 32, _q4_0),
            PackedType(_K.Q4_1, 4, 32, _q4_1),
            PackedType(_K.Q4_K, 4, 32, _q4_k),
            PackedType(_K.Q5_0, 8, 32, _q5_0),
            PackedType(_K.Q5_1, 8, 32, _q5_1),
            PackedType(_K.Q5_K, 8, 32, _q5_k),
            PackedType(_K.Q6_K, 8, 16, _q6_k),
            PackedType(_K.Q8_0, 8, 32, _q8_0),
            PackedType(_K.IQ4_NL, 4, 32, _iq4_nl, "iq4"),
            PackedType(_K.IQ4_XS, 4, 32, _iq4_xs, "iq4"),
            PackedType(_K.MXFP4, 4, 32, _mxfp4, "e2m1"),
        )
    }
)
