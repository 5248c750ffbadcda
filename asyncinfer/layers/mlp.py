"""The feed-forward layer."""

from __future__ import annotations

import torch

from asyncinfer.layers.activation import Activation
from asyncinfer.quantization import Linear

__all__ = ["MLP"]

#: Elements of `up`'s output at once, on a CPU. A larger output leaves the processor's cache, and
#: the allocator returns it to the system, so that its pages are faulted in again at every layer.
_CPU_TILE = 4 << 20


class MLP:
    """`down(activation(up(x)))`; the output of `up` is `width` wide. In a gated layer `up` is the
    packed gate and up projection."""

    __slots__ = ("activation", "down", "tile", "up")

    def __init__(self, up: Linear, activation: Activation, down: Linear, width: int) -> None:
        self.up = up
        self.activation = activation
        self.down = down
        self.tile = max(128, _CPU_TILE // width)

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        if x.shape[0] > self.tile and not x.is_cuda:
            return torch.cat([self._tokens(part) for part in torch.split(x, self.tile)])
        return self._tokens(x)

    def _tokens(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(self.activation(self.up(x)))
