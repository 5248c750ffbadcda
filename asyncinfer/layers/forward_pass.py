"""`ForwardPass`: what every layer of one forward pass is given beside its input."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import torch

from asyncinfer.attention import Attend, LayerStates
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
    #: The factors of the tokens' queries, for each of the model's attention temperatures: float32
    #: `[tokens, 1, 1]`.
    temperatures: Sequence[torch.Tensor] = ()
    #: The states of layers that keep one in place of KV; None where no layer does.
    states: LayerStates | None = None
    #: The per-layer embeddings of the tokens, `[tokens, layers, size]`; None where layers get none.
    per_layer: torch.Tensor | None = None
    #: The keys and values `[tokens, kv_heads, head_dim]` that later layers share, by layer.
    shared: dict[int, tuple[torch.Tensor, torch.Tensor]] = field(default_factory=dict)
    #: The hidden states `[tokens, hidden]` for a drafting head, layer by layer.
    captured: list[torch.Tensor] = field(default_factory=list)
