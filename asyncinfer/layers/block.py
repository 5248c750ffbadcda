"""One layer of the decoder, in each order of attention, feed-forward and norms."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

import torch

from asyncinfer.attention import Attend
from asyncinfer.layers.norm import Norm
from asyncinfer.layers.rope import Angles

__all__ = [
    "Attention",
    "DecoderLayer",
    "FeedForward",
    "Layer",
    "ParallelLayer",
    "added",
    "followed",
]

#: `[tokens, hidden]` to a new tensor of that shape.
FeedForward = Callable[[torch.Tensor], torch.Tensor]


class Attention(Protocol):
    """Attention with its projections."""

    def __call__(self, x: torch.Tensor, angles: Sequence[Angles], attend: Attend) -> torch.Tensor:
        """`[tokens, hidden]` to a new tensor of that shape."""


#: A whole layer is called as its attention is.
Layer = Attention


class DecoderLayer:
    """Attention, then feed-forward: each takes the normalised residual stream, and is added to
    it."""

    __slots__ = ("attention", "attention_norm", "mlp", "mlp_norm")

    def __init__(
        self, attention_norm: Norm, attention: Attention, mlp_norm: Norm, mlp: FeedForward
    ) -> None:
        self.attention_norm = attention_norm
        self.attention = attention
        self.mlp_norm = mlp_norm
        self.mlp = mlp

    def __call__(self, x: torch.Tensor, angles: Sequence[Angles], attend: Attend) -> torch.Tensor:
        x = self.attention(self.attention_norm(x), angles, attend).add_(x)
        return self.mlp(self.mlp_norm(x)).add_(x)


class ParallelLayer:
    """Attention and feed-forward in parallel, both on the layer's input (Wang and Komatsuzaki,
    2021). `mlp_norm` None: they share one norm."""

    __slots__ = ("attention", "attention_norm", "mlp", "mlp_norm")

    def __init__(
        self, attention_norm: Norm, attention: Attention, mlp_norm: Norm | None, mlp: FeedForward
    ) -> None:
        self.attention_norm = attention_norm
        self.attention = attention
        self.mlp_norm = mlp_norm
        self.mlp = mlp

    def __call__(self, x: torch.Tensor, angles: Sequence[Angles], attend: Attend) -> torch.Tensor:
        normed = self.attention_norm(x)
        attended = self.attention(normed, angles, attend)
        fed = self.mlp(normed if self.mlp_norm is None else self.mlp_norm(x))
        return attended.add_(fed).add_(x)


def followed(function: Callable[..., torch.Tensor], after: Norm) -> Callable[..., torch.Tensor]:
    """`after` applied to the result of `function`."""

    def both(*arguments: object) -> torch.Tensor:
        return after(function(*arguments))

    return both


def added(first: FeedForward, second: FeedForward) -> FeedForward:
    """The sum of both layers."""

    def both(x: torch.Tensor) -> torch.Tensor:
        return first(x).add_(second(x))

    return both
