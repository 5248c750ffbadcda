"""The linear layers of many experts, and the one place where they take their storage format."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

import torch
import torch.nn.functional as F

from asyncinfer.kernels.reference.grouped_linear import grouped_linear
from asyncinfer.quantization.linear import make_linear

__all__ = ["DenseGrouped", "GroupedLinear", "SeparateLinears", "make_grouped_linear"]


class GroupedLinear(Protocol):
    """`y = x W[e]^T + b[e]` for the rows of each expert `e`."""

    def __call__(self, x: torch.Tensor, ends: torch.Tensor) -> torch.Tensor:
        """`[n, in]`, its rows sorted by expert, to a new tensor `[n, out]`. `ends` int32
        `[experts]`: expert `e` has the rows `ends[e - 1] .. ends[e] - 1`."""


class SeparateLinears:
    """A layer of its own for each expert, in a format of single layers: for CPUs, where the
    product of an expert is large beside its call."""

    def __init__(self, weight: torch.Tensor, bias: torch.Tensor | None, storage: str) -> None:
        # Copies: what a format lets go of its weight is then really let go.
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
    """Weights as they are, in one grouped product where torch has one: the host then never learns
    how the rows are shared out."""

    def __init__(self, weight: torch.Tensor, bias: torch.Tensor | None) -> None:
        self._weight = weight
        self._bias = bias
        self._product: Callable[..., Any] | None = getattr(F, "grouped_mm", None)

    def __call__(self, x: torch.Tensor, ends: torch.Tensor) -> torch.Tensor:
        if self._product is None:
            return grouped_linear(x, self._weight, ends, self._bias)
        y: torch.Tensor = self._product(x, self._weight.transpose(1, 2), offs=ends)
        if self._bias is not None:
            rows = torch.arange(x.shape[0], device=x.device, dtype=ends.dtype)
            y = y.add_(self._bias.index_select(0, torch.searchsorted(ends, rows, right=True)))
        return y


def make_grouped_linear(
    weight: torch.Tensor, bias: torch.Tensor | None = None, *, storage: str = "none"
) -> GroupedLinear:
    """Layers of `weight` `[experts, out, in]` and `bias` `[experts, out]`, stored as `storage`
    names ("none": as they are). Owns both from then on."""
    if weight.device.type == "cpu" or storage != "none":
        return SeparateLinears(weight, bias, storage)
    return DenseGrouped(weight, bias)
