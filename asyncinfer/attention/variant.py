"""`AttentionVariant`: what a layer's attention does beyond the plain causal softmax."""

from __future__ import annotations

from dataclasses import dataclass

import torch

__all__ = ["AttentionVariant"]


@dataclass(frozen=True, slots=True, eq=False)
class AttentionVariant:
    """A layer's own rules; a layer without any has no variant."""

    #: A token at position `p` sees the keys `p - window + 1 .. p`; None: all up to `p`.
    window: int | None = None
    #: Scores become `softcap * tanh(scores / softcap)`.
    softcap: float | None = None
    #: float32 `[heads]`: the logit of one key more in each head's softmax, whose value is zero.
    sinks: torch.Tensor | None = None
