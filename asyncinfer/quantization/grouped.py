"""Linear layers of many experts, and the choice of their storage format."""

from __future__ import annotations

from typing import Protocol

import torch

from asyncinfer.kernels import ops
from asyncinfer.kernels.dispatch import has_triton_kernel
from asyncinfer.quantization.int8 import quantised
from asyncinfer.quantization.linear import make_linear

__all__ = ["DenseGrouped", "GroupedLinear", "SeparateLinears", "make_grouped_linear"]


class GroupedLinear(Protocol):
    """`y = x W[e]^T + b[e]` for the rows of each expert `e`."""

    def __call__(self, x: torch.Tensor, ends: torch.Tensor) -> torch.Tensor:
        """`[n, in]`, its rows sorted by expert, to a new tensor `[n, out]`. `ends` int32
        `[experts]`: expert `e` has the rows `ends[e - 1] .. ends[e] - 1`."""


class SeparateLinears:
    """A linear layer for each expert, for CPUs, where a call costs little beside an expert's
    product. The host reads `ends`."""

    def __init__(self, weight: torch.Tensor, bias: torch.Tensor | None, storage: str) -> None:
        # Copies, so that memory of the whole weight is freed when a format drops its part.
        self._experts = [
            make_linear(w.clone(), None if bias is None else bias[expert], storage=storage)
            for expert, w in enumerate(weight)
        ]
        self._size = weight.shape[1]

    def __call__(self, x: torch.Tensor, ends: torch.Tensor) -> torch.Tensor:
        out = x.new_empty(x.shape[0], self._size)
        start = 0
        for expert, end in zip(self._experts, ends.tolist(), strict=True):
            if end > start:
                out[start:end] = expert(x[start:end])
            start = end
        return out


class DenseGrouped:
    """Weights in full precision, or int8 with `scales`, in one grouped product. The host does not
    read `ends`, so a GPU is not waited for."""

    def __init__(
        self,
        weight: torch.Tensor,
        bias: torch.Tensor | None,
        scales: torch.Tensor | None = None,
    ) -> None:
        self._weight = weight.contiguous()
        self._bias = bias
        self._scales = scales

    def __call__(self, x: torch.Tensor, ends: torch.Tensor) -> torch.Tensor:
        return ops.grouped_linear(x, self._weight, ends, self._bias, scales=self._scales)


def make_grouped_linear(
    weight: torch.Tensor, bias: torch.Tensor | None = None, *, storage: str = "plain"
) -> GroupedLinear:
    """Layers of `weight` `[experts, out, in]` and `bias` `[experts, out]`, stored as `storage`
    names ("plain": as they are). Owns both from then on."""
    if not has_triton_kernel("grouped_linear", weight) or storage not in ("plain", "int8"):
        return SeparateLinears(weight, bias, storage)
    if storage == "plain":
        return DenseGrouped(weight, bias)
    numbers, scales = quantised(weight)
    return DenseGrouped(numbers, bias, scales)
