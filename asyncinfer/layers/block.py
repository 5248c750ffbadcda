"""One layer of the decoder, in each order of attention, feed-forward and norms; and its usual
feed-forward layer, the MLP."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

import torch

from asyncinfer.kernels.native import add_
from asyncinfer.kernels.rehearsal import device_of
from asyncinfer.layers.activation import Activation
from asyncinfer.layers.forward_pass import ForwardPass
from asyncinfer.layers.lora import LoraLinear, LoraRows
from asyncinfer.layers.norm import Norm

__all__ = [
    "MLP",
    "Attention",
    "DecoderLayer",
    "FeedForward",
    "Layer",
    "ParallelLayer",
    "SublayerOnly",
    "added",
    "added_attention",
    "fed",
    "followed",
    "gated",
    "normed",
    "scaled",
]

#: Tokens at once, on a CPU. The output of `up` for more of them leaves the processor's cache, and
#: the allocator returns it to the system, so that its pages are faulted in again at every layer.
#: With fewer, weights are read more often than they need to be.
_CPU_TILE = 256


class FeedForward(Protocol):
    """An MLP, or experts."""

    def __call__(self, x: torch.Tensor, adapters: LoraRows | None = None) -> torch.Tensor:
        """`[tokens, hidden]` to a new tensor of that shape."""


class MLP:
    """`down(activation(up(x)))`. In a gated layer `up` is the packed gate and up projection."""

    __slots__ = ("activation", "down", "up")

    def __init__(self, up: LoraLinear, activation: Activation, down: LoraLinear) -> None:
        self.up = up
        self.activation = activation
        self.down = down

    def __call__(self, x: torch.Tensor, adapters: LoraRows | None = None) -> torch.Tensor:
        if x.shape[0] > _CPU_TILE and device_of(x.device).type != "cuda":
            parts = []
            for first in range(0, x.shape[0], _CPU_TILE):
                end = min(first + _CPU_TILE, x.shape[0])
                theirs = None if adapters is None else adapters.part(first, end)
                parts.append(self._tokens(x[first:end], theirs))
            return torch.cat(parts)
        return self._tokens(x, adapters)

    def _tokens(self, x: torch.Tensor, adapters: LoraRows | None) -> torch.Tensor:
        return self.down(self.activation(self.up(x, adapters)), adapters)


class Attention(Protocol):
    """Attention with its projections, or what stands in its place."""

    def __call__(self, x: torch.Tensor, forward: ForwardPass) -> torch.Tensor:
        """`[tokens, hidden]` to a new tensor of that shape."""


#: A whole layer is called as its attention is.
Layer = Attention


class DecoderLayer:
    """Attention, then feed-forward: each takes the normalised residual stream, and its result is
    added to the stream."""

    __slots__ = ("attention", "attention_norm", "mlp", "mlp_norm")

    def __init__(
        self, attention_norm: Norm, attention: Attention, mlp_norm: Norm, mlp: FeedForward
    ) -> None:
        self.attention_norm = attention_norm
        self.attention = attention
        self.mlp_norm = mlp_norm
        self.mlp = mlp

    def __call__(self, x: torch.Tensor, forward: ForwardPass) -> torch.Tensor:
        x = add_(self.attention(self.attention_norm(x), forward), x)
        return add_(self.mlp(self.mlp_norm(x), forward.adapters), x)


class SublayerOnly:
    """Attention, a mixer or a feed-forward part alone, on the normalised residual stream."""

    __slots__ = ("norm", "sublayer")

    def __init__(self, norm: Norm, sublayer: Attention) -> None:
        self.norm = norm
        self.sublayer = sublayer

    def __call__(self, x: torch.Tensor, forward: ForwardPass) -> torch.Tensor:
        return add_(self.sublayer(self.norm(x), forward), x)


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

    def __call__(self, x: torch.Tensor, forward: ForwardPass) -> torch.Tensor:
        normed = self.attention_norm(x)
        attended = self.attention(normed, forward)
        fed = self.mlp(normed if self.mlp_norm is None else self.mlp_norm(x), forward.adapters)
        return add_(add_(attended, fed), x)


def followed(function: Callable[..., torch.Tensor], after: Norm) -> Callable[..., torch.Tensor]:
    """`after` applied to the result of `function`."""

    def both(*arguments: object) -> torch.Tensor:
        return after(function(*arguments))

    return both


def normed(norm: Norm, layer: FeedForward) -> FeedForward:
    """`layer`, applied to the output of `norm`."""

    def both(x: torch.Tensor, adapters: LoraRows | None = None) -> torch.Tensor:
        return layer(norm(x), adapters)

    return both


def scaled(function: Callable[..., torch.Tensor], factor: float) -> Callable[..., torch.Tensor]:
    """`factor` times the result of `function`, which is a new tensor; 1 costs nothing."""
    if factor == 1.0:
        return function
    return followed(function, lambda x: x.mul_(factor))


def added(first: FeedForward, second: FeedForward) -> FeedForward:
    """A layer that gives the sum of both."""

    def both(x: torch.Tensor, adapters: LoraRows | None = None) -> torch.Tensor:
        return first(x, adapters).add_(second(x, adapters))

    return both


def gated(layer: FeedForward, gate: Callable[[torch.Tensor], torch.Tensor]) -> FeedForward:
    """`layer` times the sigmoid of `gate`, which gives `[tokens, 1]`."""

    def both(x: torch.Tensor, adapters: LoraRows | None = None) -> torch.Tensor:
        return layer(x, adapters).mul_(gate(x).sigmoid())

    return both


def added_attention(first: Attention, second: Attention) -> Attention:
    """The sum of both layers' outputs for the same input."""

    def both(x: torch.Tensor, forward: ForwardPass) -> torch.Tensor:
        return first(x, forward).add_(second(x, forward))

    return both


def fed(mlp: FeedForward) -> Attention:
    """A feed-forward layer with the signature of attention."""

    def feed(x: torch.Tensor, forward: ForwardPass) -> torch.Tensor:
        return mlp(x, forward.adapters)

    return feed
