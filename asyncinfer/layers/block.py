"""One layer of the decoder."""

from __future__ import annotations

import torch

from asyncinfer.attention import Attend
from asyncinfer.layers.attention import SelfAttention
from asyncinfer.layers.mlp import GatedMLP
from asyncinfer.layers.norm import RMSNorm

__all__ = ["DecoderLayer"]


class DecoderLayer:
    """Pre-norm attention and feed-forward, each added to the residual stream."""

    __slots__ = ("attention", "attention_norm", "mlp", "mlp_norm")

    def __init__(
        self, attention_norm: RMSNorm, attention: SelfAttention, mlp_norm: RMSNorm, mlp: GatedMLP
    ) -> None:
        self.attention_norm = attention_norm
        self.attention = attention
        self.mlp_norm = mlp_norm
        self.mlp = mlp

    def __call__(
        self, x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, attend: Attend
    ) -> torch.Tensor:
        x = self.attention(self.attention_norm(x), cos, sin, attend).add_(x)
        return self.mlp(self.mlp_norm(x)).add_(x)
