"""Linear layers of many experts, and the choice of their storage format."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Protocol

import torch

from asyncinfer.kernels import ops
from asyncinfer.kernels.dispatch import has_triton_kernel
from asyncinfer.kernels.rehearsal import device_of
from asyncinfer.quantization.cuda_packed import PackedGrouped, for_kernels, kernels_read
from asyncinfer.quantization.fp8 import in_e4m3
from asyncinfer.quantization.int4 import GROUPS, group_for, quantised_4_bits
from asyncinfer.quantization.int8 import in_8_bits
from asyncinfer.quantization.linear import HeldWeight, Linear, make_linear
from asyncinfer.quantization.packed_weight import PackedWeight
from asyncinfer.quantization.weight import QuantisedWeight

__all__ = ["DenseGrouped", "GroupedLinear", "SeparateLinears", "make_grouped_linear"]


class GroupedLinear(Protocol):
    """`y = x W[e]^T + b[e]` for the rows of each expert `e`."""

    def __call__(self, x: torch.Tensor, ends: torch.Tensor) -> torch.Tensor:
        """`[n, in]`, its rows sorted by expert, to a new tensor `[n, out]`. `ends` int32
        `[experts]`: expert `e` has the rows `ends[e - 1] .. ends[e] - 1`."""


class SeparateLinears:
    """A linear layer for each expert, for CPUs, where a call costs little beside an expert's
    product. The host reads `ends`."""

    def __init__(
        self, weights: Iterable[HeldWeight], bias: torch.Tensor | None, storage: str
    ) -> None:
        """`weights`: `[out, in]` of each expert; `bias` `[experts, out]`."""
        self._experts: list[Linear] = []
        self._size = 0
        for expert, weight in enumerate(weights):
            own = None if bias is None else bias[expert]
            self._experts.append(make_linear(weight, own, storage=storage))
            self._size = weight.shape[0]

    def __call__(self, x: torch.Tensor, ends: torch.Tensor) -> torch.Tensor:
        out = x.new_empty(x.shape[0], self._size)
        start = 0
        for expert, end in zip(self._experts, ends.tolist(), strict=True):
            if end > start:
                out[start:end] = expert(x[start:end])
            start = end
        return out


def _per_expert(weight: torch.Tensor | PackedWeight) -> Iterator[torch.Tensor | PackedWeight]:
    """The experts' weights. Floats are copied, so that the stacked weight is freed when a format
    replaces its parts; packed ones stay where they are, or are all converted at once."""
    for expert in range(weight.shape[0]):
        part = weight[expert]
        yield part.clone() if isinstance(part, torch.Tensor) else part


class DenseGrouped:
    """Weights in full precision in one grouped product. The host does not read `ends`, so it never
    waits for a GPU."""

    def __init__(self, weight: torch.Tensor, bias: torch.Tensor | None) -> None:
        self._weight = weight.contiguous()
        self._bias = bias

    def __call__(self, x: torch.Tensor, ends: torch.Tensor) -> torch.Tensor:
        return ops.grouped_linear(x, self._weight, ends, self._bias)


def make_grouped_linear(
    weight: torch.Tensor | PackedWeight,
    bias: torch.Tensor | None = None,
    *,
    storage: str = "plain",
) -> GroupedLinear:
    """Layers of `weight` `[experts, out, in]` and `bias` `[experts, out]`, stored as `storage`
    names ("plain": as they are). Owns both from then on."""
    if isinstance(weight, PackedWeight) and storage != "plain":
        weight = weight.dequantised()
    if isinstance(weight, torch.Tensor):
        made = _made(weight, storage)
        if made is not None:
            return PackedGrouped(made, bias)
    elif (numbers := for_kernels(weight)) is not None:
        return PackedGrouped(numbers, bias)
    elif weight.device.type == "cpu":
        return SeparateLinears(_per_expert(weight), bias, storage)
    else:
        weight = weight.dequantised()
    plain = storage in ("plain", "floats")
    if plain and has_triton_kernel("grouped_linear", weight):
        return DenseGrouped(weight, bias)
    return SeparateLinears(_per_expert(weight), bias, storage)


def _made(weight: torch.Tensor, storage: str) -> QuantisedWeight | None:
    """The weight as `make_linear` would store each expert; None if no kernel of a GPU supports
    that."""
    if not _has_kernels(weight):
        return None
    if storage in GROUPS:
        group = group_for(weight.shape[2], GROUPS[storage])
        if group is not None:
            made = quantised_4_bits(weight.flatten(0, 1), group).view(*weight.shape[:2])
            return made if kernels_read(made) else None
    if storage == "fp8":
        return in_e4m3(weight)
    # Where no group divides the inputs, `make_linear` stores 8 bits.
    return in_8_bits(weight) if storage == "int8" or storage in GROUPS else None


def _has_kernels(weight: torch.Tensor) -> bool:
    """Whether the grouped product is one launch on this device, for any dtype."""
    return device_of(weight.device).type == "cuda"
