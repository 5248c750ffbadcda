"""Root mean square normalisation as a layer."""

from __future__ import annotations

import torch

from asyncinfer.kernels import ops

__all__ = ["RMSNorm"]


class RMSNorm:
    """`[tokens, size]` to the same shape and dtype."""

    __slots__ = ("eps", "weight")

    def __init__(self, weight: torch.Tensor, eps: float) -> None:
        self.weight = weight
        self.eps = eps

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        return ops.rms_norm(x, self.weight, self.eps)
