"""GPU layers whose weights stay in 4 or 8 bits."""

from __future__ import annotations

from typing import Final

import torch

from asyncinfer.kernels import ops
from asyncinfer.kernels.rehearsal import device_of
from asyncinfer.quantization.blocks import BlockWeight
from asyncinfer.quantization.dense import CudaLinear
from asyncinfer.quantization.packed_weight import PackedWeight
from asyncinfer.quantization.stacked import StackedWeight
from asyncinfer.quantization.weight import QuantisedWeight

__all__ = ["CudaPackedLinear", "PackedGrouped", "for_kernels", "kernels_read", "on_gpu"]

_FLOAT16_MOST: Final = 65504.0
#: Smaller numbers lose bits in float16.
_FLOAT16_LEAST: Final = 2.0**-14


def on_gpu(weight: torch.Tensor | PackedWeight) -> bool:
    """Whether a weight of this device and dtype can be that of a `CudaPackedLinear`."""
    half = weight.dtype in (torch.float16, torch.bfloat16)
    return half and device_of(weight.device).type == "cuda"


def kernels_read(weight: QuantisedWeight) -> bool:
    """Whether kernels of a GPU, or torch's operators in their place, multiply the weight as it is:
    they support its code and its groups."""
    return weight.layout.readable and on_gpu(weight)


def for_kernels(weight: PackedWeight) -> QuantisedWeight | None:
    """The weight with separate numbers, scales and offsets, if kernels of a GPU support it.
    Matrices of several formats become one matrix of 8-bit whole numbers."""
    if not on_gpu(weight):
        return None
    parts = weight.parts if isinstance(weight, StackedWeight) else (weight,)
    apart = [part.grouped() if isinstance(part, BlockWeight) else part for part in parts]
    numbers = [part for part in apart if isinstance(part, QuantisedWeight)]
    if len(numbers) < len(apart) or not QuantisedWeight.joinable(numbers):
        return None
    joined = QuantisedWeight.cat(numbers)
    return joined if kernels_read(joined) else None


class CudaPackedLinear(CudaLinear):
    """A layer whose kernels dequantise numbers as they load them: for few tokens in one launch with
    the norm before it and the gate or residual after it, for many in a tiled product."""

    __slots__ = ()

    def __init__(self, weight: QuantisedWeight, bias: torch.Tensor | None) -> None:
        super().__init__(weight.numbers, bias, *_factors(weight), weight.named)

    def product(self, x: torch.Tensor) -> torch.Tensor:
        assert self.scales is not None
        # Computed as a grouped product with a single expert.
        ends = torch.full((1,), x.shape[0], dtype=torch.int32, device=x.device)
        return ops.grouped_linear(
            x,
            self.weight[None],
            ends,
            None if self.bias is None else self.bias[None],
            scales=self.scales[None],
            offsets=None if self.offsets is None else self.offsets[None],
            code=self.code,
        )


class PackedGrouped:
    """Layers of many experts in one grouped product. The host does not read `ends`."""

    def __init__(self, weight: QuantisedWeight, bias: torch.Tensor | None) -> None:
        self._numbers = weight.numbers.contiguous()
        self._scales, self._offsets = _factors(weight)
        self._code = weight.named
        self._bias = bias

    def __call__(self, x: torch.Tensor, ends: torch.Tensor) -> torch.Tensor:
        return ops.grouped_linear(
            x,
            self._numbers,
            ends,
            self._bias,
            scales=self._scales,
            offsets=self._offsets,
            code=self._code,
        )


def _factors(weight: QuantisedWeight) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Scales and offsets in as few bytes as they need."""
    scales, offsets = weight.scales.contiguous(), weight.offsets
    if weight.scales.shape[-1] == 1 and offsets is None:
        # One scale for each row is small beside the row.
        return scales.float(), None
    return _smallest(scales), None if offsets is None else _smallest(offsets.contiguous())


def _smallest(factors: torch.Tensor) -> torch.Tensor:
    """Powers of two in a byte. Others in float16, which rounds them less than a product's 16-bit
    floats round the weight's numbers; unchanged where they are not normal in float16."""
    if factors.dtype.itemsize <= 2:
        return factors
    powers = factors.to(torch.float8_e8m0fnu)
    if torch.equal(powers.to(factors.dtype), factors):
        return powers
    sizes = factors.abs()
    least = torch.where(sizes > 0, sizes, 1.0).min()
    normal = (sizes.max() <= _FLOAT16_MOST) & (least >= _FLOAT16_LEAST)
    return factors.half() if bool(normal) else factors
