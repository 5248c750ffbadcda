"""`AttentionVariant`: what a layer's attention does beyond the plain causal softmax."""

from __future__ import annotations

from dataclasses import dataclass

import torch

__all__ = ["AttentionVariant"]


@dataclass(frozen=True, slots=True, eq=False)
class AttentionVariant:
    """How a layer's attention differs from plain causal attention, which has no variant."""

    #: A token at position `p` sees the keys `p - window + 1 .. p`; None: all up to `p`. In
    #: `WholeAttention` it sees as many on its other side.
    window: int | None = None
    #: Scores become `softcap * tanh(scores / softcap)`.
    softcap: float | None = None
    #: float32 `[heads]`: the logit of an additional key in each head's softmax; its value is 0.
    sinks: torch.Tensor | None = None
