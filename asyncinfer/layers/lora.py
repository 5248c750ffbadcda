"""Low-rank adapters (LoRA: Hu et al., 2021) on linear layers, many in one batch."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Protocol

import torch

from asyncinfer.quantization import Linear

__all__ = ["LoraLayers", "LoraLinear", "LoraRows", "LoraWeights"]


@dataclass(frozen=True, slots=True, kw_only=True)
class LoraWeights:
    """The two thin matrices of every adapter for one linear layer, each adapter in a slot.

    A layer that packs several projections has a first matrix for each of them: row `j * parts + p`
    of `down` is row `j` of projection `p`.
    """

    #: `[slots, rank * parts, inputs]`.
    down: torch.Tensor
    #: `[slots, rank, outputs]`, scaled. Column `c` belongs to the projection of output `c`.
    up: torch.Tensor
    #: Outputs of each projection.
    sizes: tuple[int, ...]
    #: int32 `[slots]`, on the device: the slot's rank in this layer, 0 if its adapter leaves the
    #: layer as it is.
    ranks: torch.Tensor
    #: The same on the host.
    host_ranks: list[int]


#: By the layer's name in the tensor table, such as "layers.0.attention.qkv".
LoraLayers = Mapping[str, LoraWeights]


class LoraRows(Protocol):
    """Which adapter each query token of a forward pass takes."""

    def add(self, layer: str, x: torch.Tensor, y: torch.Tensor) -> None:
        """Add the products of the tokens' adapters with `x` `[tokens, inputs]` in this layer to `y`
        `[tokens, outputs]`, in place."""

    def part(self, first: int, end: int) -> LoraRows:
        """The adapters of the tokens `first .. end - 1`."""


class LoraLinear:
    """A linear layer that adapters may be applied to. `layer` is its name in the tensor table."""

    __slots__ = ("base", "layer")

    def __init__(self, base: Linear, layer: str) -> None:
        self.base = base
        self.layer = layer

    def __call__(self, x: torch.Tensor, adapters: LoraRows | None = None) -> torch.Tensor:
        y = self.base(x)
        if adapters is not None:
            adapters.add(self.layer, x, y)
        return y
