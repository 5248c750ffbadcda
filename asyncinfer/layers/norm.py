"""Norms as layers."""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal, TypeAlias

import torch
import torch.nn.functional as F

from asyncinfer.kernels import ops

__all__ = ["LayerNorm", "Norm", "NormKind", "RMSNorm", "make_norm"]

#: "rms": by the root mean square; "layer": by mean and variance, weight and bias; "...-plus-one":
#: the same, the factor being 1 + weight.
NormKind = Literal["rms", "rms-plus-one", "layer", "layer-plus-one"]
#: `[tokens, size]` to the same shape and dtype.
Norm: TypeAlias = "Callable[[torch.Tensor], torch.Tensor]"


class RMSNorm:
    """`[tokens, size]` to the same shape and dtype."""

    __slots__ = ("eps", "plus_one", "weight")

    def __init__(self, weight: torch.Tensor, eps: float, plus_one: bool = False) -> None:
        self.weight = weight
        self.eps = eps
        self.plus_one = plus_one

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        return ops.rms_norm(x, self.weight, self.eps, plus_one=self.plus_one)


class PlainRMSNorm:
    """`RMSNorm` without a weight."""

    __slots__ = ("eps",)

    def __init__(self, eps: float) -> None:
        self.eps = eps

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        return F.rms_norm(x.float(), x.shape[-1:], None, self.eps).to(x.dtype)


class LayerNorm:
    """Layer normalisation (Ba et al., 2016): `[tokens, size]` to the same shape and dtype."""

    __slots__ = ("bias", "eps", "weight")

    def __init__(self, weight: torch.Tensor | None, bias: torch.Tensor | None, eps: float) -> None:
        self.weight = weight
        self.bias = bias
        self.eps = eps

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        return F.layer_norm(x, x.shape[-1:], self.weight, self.bias, self.eps)


def make_norm(
    kind: NormKind, weight: torch.Tensor | None, bias: torch.Tensor | None, eps: float
) -> Norm:
    """The norm of a kind; only layer norms may have a bias."""
    if kind == "layer-plus-one" and weight is not None:
        weight = weight + 1
    if kind in ("layer", "layer-plus-one"):
        return LayerNorm(weight, bias, eps)
    if weight is None:
        return PlainRMSNorm(eps)
    return RMSNorm(weight, eps, plus_one=kind == "rms-plus-one")
