"""Self-attention with packed projections over a paged KV cache."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from asyncinfer.attention import Attend, AttentionVariant
from asyncinfer.layers.rope import Angles
from asyncinfer.quantization import Linear

__all__ = ["Prepare", "SelfAttention"]

#: Prepares query and key heads `[tokens, heads, head_dim]` for attention: a norm, then the
#: rotation.
Prepare = Callable[[torch.Tensor, Sequence[Angles]], torch.Tensor]


class SelfAttention:
    """`[tokens, hidden]` to `[tokens, hidden]`. `qkv` is the packed projection: its output holds
    the query heads, then the key heads, then the value heads."""

    __slots__ = ("head_dim", "heads", "kv_heads", "layer", "out", "prepare", "qkv", "variant")

    def __init__(
        self,
        layer: int,
        heads: int,
        kv_heads: int,
        head_dim: int,
        qkv: Linear,
        prepare: Prepare,
        out: Linear,
        variant: AttentionVariant | None = None,
    ) -> None:
        self.layer = layer
        self.heads = heads
        self.kv_heads = kv_heads
        self.head_dim = head_dim
        self.qkv = qkv
        self.prepare = prepare
        self.out = out
        self.variant = variant

    def __call__(self, x: torch.Tensor, angles: Sequence[Angles], attend: Attend) -> torch.Tensor:
        qkv = self.qkv(x).view(x.shape[0], -1, self.head_dim)
        prepared = self.heads + self.kv_heads
        qk = self.prepare(qkv[:, :prepared], angles)
        q, k, v = qk[:, : self.heads], qk[:, self.heads :], qkv[:, prepared:]
        return self.out(attend(self.layer, q, k, v, self.variant))
