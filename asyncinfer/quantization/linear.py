"""A linear layer, and the one place where it takes its storage format."""

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


#: Makes a layer of a weight `[out, in]` and a bias `[out]`. It owns both from then on: what it
#: stores in another form it does not keep in the first.
LinearFormat = Callable[[torch.Tensor, torch.Tensor | None], Linear]

_FORMATS: dict[str, LinearFormat] = {"plain": dense, "int8": int8}


def make_linear(
    weight: torch.Tensor, bias: torch.Tensor | None = None, *, storage: str = "plain"
) -> Linear:
    """A layer of `weight` `[out, in]` stored as `storage` names ("plain": as it is)."""
    return _FORMATS[storage](weight, bias)
