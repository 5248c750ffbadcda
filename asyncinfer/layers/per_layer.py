"""Per-layer embeddings (Gemma 3n, 2025): each layer gets a small vector of each token besides its
input."""

from __future__ import annotations

from collections.abc import Callable

import torch

from asyncinfer.layers.activation import Activation
from asyncinfer.layers.block import Layer
from asyncinfer.layers.forward_pass import ForwardPass
from asyncinfer.layers.lora import LoraLinear
from asyncinfer.layers.norm import Norm
from asyncinfer.quantization import Linear

__all__ = ["PerLayerInputs", "WithPerLayerInput"]


class PerLayerInputs:
    """The vectors of all layers: an embedding of the token, and a projection of its first hidden
    state."""

    def __init__(
        self,
        embedding: Callable[[torch.Tensor], torch.Tensor],
        projection: Linear,
        norm: Norm,
        layers: int,
        hidden_size: int,
    ) -> None:
        """`embedding` takes token ids int64 `[tokens]`; it and `projection` give `[tokens,
        layers * size]`."""
        self._embedding = embedding
        self._projection = projection
        self._norm = norm
        self._layers = layers
        self._scale = hidden_size**-0.5

    def __call__(self, token_ids: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        """`[tokens, layers, size]` of int64 `[tokens]` and their embedding `[tokens, hidden]`."""
        projected = self._projection(x).mul_(self._scale).view(len(x), self._layers, -1)
        embedded = self._embedding(token_ids).view_as(projected)
        return self._norm(projected).add_(embedded).mul_(2.0**-0.5)


class WithPerLayerInput:
    """`layer`, whose output gates the layer's vector; a projection of the result is added to the
    output."""

    __slots__ = ("activation", "gate", "index", "layer", "norm", "out")

    def __init__(
        self,
        layer: Layer,
        index: int,
        gate: LoraLinear,
        activation: Activation,
        out: LoraLinear,
        norm: Norm,
    ) -> None:
        self.layer = layer
        self.index = index
        self.gate = gate
        self.activation = activation
        self.out = out
        self.norm = norm

    def __call__(self, x: torch.Tensor, forward: ForwardPass) -> torch.Tensor:
        assert forward.per_layer is not None
        x = self.layer(x, forward)
        gate = self.activation(self.gate(x, forward.adapters))
        given = gate.mul_(forward.per_layer[:, self.index])
        return self.norm(self.out(given, forward.adapters)).add_(x)
