"""Weights as they are: full precision, laid out for the device's own matrix product."""

from __future__ import annotations

import torch
import torch.nn.functional as F

from asyncinfer.kernels import onednn

__all__ = ["DenseLinear", "OneDnnLinear", "dense"]


class DenseLinear:
    """`F.linear`: cuBLAS on a GPU, torch's BLAS on a CPU."""

    __slots__ = ("bias", "weight")

    def __init__(self, weight: torch.Tensor, bias: torch.Tensor | None) -> None:
        self.weight = weight
        self.bias = bias

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        return F.linear(x, self.weight, self.bias)


class OneDnnLinear:
    """A CPU's layer with the weight in oneDNN's blocked layout, the plain one let go."""

    __slots__ = ("bias", "weight")

    def __init__(self, weight: torch.Tensor, bias: torch.Tensor | None) -> None:
        self.weight = onednn.reorder(weight)
        self.bias = bias

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        return onednn.linear(x, self.weight, self.bias)


def dense(weight: torch.Tensor, bias: torch.Tensor | None) -> DenseLinear | OneDnnLinear:
    """The layer for the weight's device and dtype."""
    if weight.device.type == "cpu" and onednn.available(weight.dtype):
        return OneDnnLinear(weight, bias)
    return DenseLinear(weight, bias)
