"""Self-attention with packed projections over a paged KV cache."""

from __future__ import annotations

import torch

from asyncinfer.attention import Attend
from asyncinfer.kernels import ops
from asyncinfer.quantization import Linear

__all__ = ["SelfAttention"]


class SelfAttention:
    """`[tokens, hidden]` to `[tokens, hidden]`. `qkv` is the packed projection: its output holds
    the query heads, then the key heads, then the value heads."""

    __slots__ = ("head_dim", "heads", "kv_heads", "layer", "out", "qkv")

    def __init__(
        self, layer: int, heads: int, kv_heads: int, head_dim: int, qkv: Linear, out: Linear
    ) -> None:
        self.layer = layer
        self.heads = heads
        self.kv_heads = kv_heads
        self.head_dim = head_dim
        self.qkv = qkv
        self.out = out

    def __call__(
        self, x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, attend: Attend
    ) -> torch.Tensor:
        qkv = self.qkv(x).view(x.shape[0], -1, self.head_dim)
        rotated = self.heads + self.kv_heads
        qk = ops.rope(qkv[:, :rotated], cos, sin)
        q, k, v = qk[:, : self.heads], qk[:, self.heads :], qkv[:, rotated:]
        return self.out(attend(self.layer, q, k, v))
