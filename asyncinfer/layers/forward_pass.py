"""`ForwardPass`: what every layer of one forward pass is given beside its input."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import torch

from asyncinfer.attention import Attend, StatePass
from asyncinfer.layers.lora import LoraRows
from asyncinfer.layers.rope import Angles

__all__ = ["ForwardPass"]


@dataclass(frozen=True, slots=True)
class ForwardPass:
    """The decoder makes one for each forward pass, and hands it to each layer."""

    #: The tokens' angles by each of the model's rotations.
    angles: Sequence[Angles]
    #: Attention by layer; layers of one KV group share it.
    attends: Mapping[int, Attend]
    #: The tokens' LoRA adapters; None where no token has one.
    adapters: LoraRows | None = None
    #: What multiplies the tokens' queries by each of the model's attention temperatures: float32
    #: `[tokens, 1, 1]`.
    temperatures: Sequence[torch.Tensor] = ()
    #: The states of layers that keep one in place of KV; None where no layer does.
    states: StatePass | None = None
    #: What each layer is given of each token beside its input, `[tokens, layers, size]`; None where
    #: no layer is.
    per_layer: torch.Tensor | None = None
    #: The keys and values `[tokens, kv_heads, head_dim]` of layers that others share, by layer.
    shared: dict[int, tuple[torch.Tensor, torch.Tensor]] = field(default_factory=dict)
    #: The hidden states `[tokens, hidden]` that a head beside the model is given, layer by layer.
    captured: list[torch.Tensor] = field(default_factory=list)
