"""`make_linear`: a linear layer in a storage format."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Final, Protocol, TypeAlias

import torch

from asyncinfer.kernels.layouts import WeightLayout
from asyncinfer.quantization.cuda_packed import CudaPackedLinear, for_kernels
from asyncinfer.quantization.dense import NativeLinear, OneDnnLinear, dense
from asyncinfer.quantization.fp8 import CudaFp8Linear, fp8
from asyncinfer.quantization.int4 import GROUPS, group_for, quantised_4_bits
from asyncinfer.quantization.int8 import int8
from asyncinfer.quantization.native_weight import NativeWeight
from asyncinfer.quantization.packed import PackedLinear, PackedRows, StackedLinear, packed_linear
from asyncinfer.quantization.packed_weight import PackedWeight
from asyncinfer.quantization.reordered import ReorderedWeight

__all__ = ["STORAGE_LAYOUTS", "HeldWeight", "Linear", "LinearFormat", "hold", "make_linear"]

#: A weight `[out, in]`, which a CPU's layer may have laid out.
HeldWeight: TypeAlias = "torch.Tensor | NativeWeight | PackedWeight | ReorderedWeight"


class Linear(Protocol):
    """`y = x W^T + b`, however `W` is stored."""

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """`[tokens, in]` to a new tensor `[tokens, out]` of the same dtype."""


#: Makes a layer of a weight `[out, in]` and a bias `[out]`, which the layer then owns: it may
#: replace the weight by one in another layout.
LinearFormat: TypeAlias = "Callable[[torch.Tensor, torch.Tensor | None], Linear]"


def _int4(group: int) -> LinearFormat:
    """The format of 4 bits in groups of this size, or smaller ones where it does not divide a
    weight's inputs; of 8 bits where none does."""

    def made(weight: torch.Tensor, bias: torch.Tensor | None) -> Linear:
        found = group_for(weight.shape[1], group)
        if found is None:
            return int8(weight, bias)
        return make_linear(quantised_4_bits(weight, found), bias)

    return made


_FORMATS: dict[str, LinearFormat] = {
    "plain": dense,
    "floats": dense,
    "int8": int8,
    "fp8": fp8,
    **{name: _int4(group) for name, group in GROUPS.items()},
}

#: The layout on a GPU of each format that the engine makes, where its groups divide the inputs.
STORAGE_LAYOUTS: Final[Mapping[str, WeightLayout]] = MappingProxyType(
    {
        "int8": WeightLayout("int8", 0),
        "fp8": WeightLayout("e4m3", 0),
        **{name: WeightLayout("int4", group, offsets=True) for name, group in GROUPS.items()},
    }
)


def make_linear(
    weight: HeldWeight | PackedRows,
    bias: torch.Tensor | None = None,
    *,
    storage: str = "plain",
) -> Linear:
    """A layer of `weight` `[out, in]` stored as `storage` names. "plain" stores it unchanged:
    quantised numbers stay quantised on a CPU, and where a GPU's kernels support them."""
    if isinstance(weight, ReorderedWeight):
        return OneDnnLinear(weight, bias)
    if isinstance(weight, NativeWeight):
        return NativeLinear(weight, bias)
    if isinstance(weight, PackedWeight) and storage != "plain":
        weight = weight.dequantised()
    if isinstance(weight, torch.Tensor):
        return _FORMATS[storage](weight, bias)
    numbers = None if isinstance(weight, PackedRows) else for_kernels(weight)
    if numbers is not None:
        by_rows = numbers.code == "e4m3" and numbers.scales.shape[-1] == 1
        return (CudaFp8Linear if by_rows else CudaPackedLinear)(numbers, bias)
    if isinstance(weight, PackedRows) or weight.device.type == "cpu":
        return packed_linear(weight, bias)
    return dense(weight.dequantised(), bias)


def hold(weight: torch.Tensor | PackedWeight, storage: str = "plain") -> HeldWeight:
    """`weight` as a CPU's layer of this storage holds it, of which `make_linear` makes a "plain"
    layer at once. `weight` itself if the layer lays nothing out, or converts it in each call."""
    layer = make_linear(weight, storage=storage)
    if isinstance(layer, NativeLinear | OneDnnLinear | PackedLinear | StackedLinear):
        return layer.held
    return weight
