"""`make_linear`: a linear layer in a storage format."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

import torch

from asyncinfer.quantization.dense import dense
from asyncinfer.quantization.int8 import int8

__all__ = ["Linear", "LinearFormat", "make_linear"]


class Linear(Protocol):
    """`y = x W^T + b`, however `W` is stored."""

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """`[tokens, in]` to a new tensor `[tokens, out]` of the same dtype."""


#: Makes a layer of a weight `[out, in]` and a bias `[out]`, which the layer owns from then on: it
#: may drop the weight for one in another layout.
LinearFormat = Callable[[torch.Tensor, torch.Tensor | None], Linear]

_FORMATS: dict[str, LinearFormat] = {"plain": dense, "int8": int8}


def make_linear(
    weight: torch.Tensor, bias: torch.Tensor | None = None, *, storage: str = "plain"
) -> Linear:
    """A layer of `weight` `[out, in]` stored as `storage` names ("plain": as it is)."""
    return _FORMATS[storage](weight, bias)
