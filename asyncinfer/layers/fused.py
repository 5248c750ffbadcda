"""`FusedLayer`: one layer of the decoder in few launches of a GPU."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from asyncinfer.attention import Attend, AttentionVariant, HeadNorms, PagedAttention
from asyncinfer.layers.block import FeedForward
from asyncinfer.layers.norm import RMSNorm
from asyncinfer.layers.rope import Angles
from asyncinfer.quantization import CudaLinear

__all__ = ["FusedLayer", "FusedMLP", "normed_experts"]


@dataclass(frozen=True, slots=True, kw_only=True)
class FusedMLP:
    """`x + mlp(norm(x))` of a gated MLP, in two launches where tokens are few."""

    norm: RMSNorm
    #: The packed gate and up, and down; the activation by its name in `ops.linear_small`.
    up: CudaLinear
    down: CudaLinear
    activation: str

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        norm = self.norm
        gated = self.up.fused(
            x, norm=norm.weight, eps=norm.eps, plus_one=norm.plus_one, activation=self.activation
        )
        return self.down.fused(gated, residual=x)


def normed_experts(norm: RMSNorm, experts: FeedForward) -> FeedForward:
    """`x + experts(norm(x))` of a mixture of experts."""

    def both(x: torch.Tensor) -> torch.Tensor:
        return experts(norm(x)).add_(x)

    return both


@dataclass(frozen=True, slots=True, kw_only=True)
class FusedLayer:
    """A `DecoderLayer` of the most common kind: RMS norms before attention and before a gated MLP
    or experts, heads that are rotated.

    With an MLP six launches where tokens are few: norm and packed projection; head norms, rotation
    and KV write; attention; output projection and residual; norm, packed projection and gate; down
    projection and residual. Above 64 tokens norms and gates are launches of their own.
    """

    index: int
    head_dim: int
    attention_norm: RMSNorm
    #: The packed projection, and attention's output projection.
    qkv: CudaLinear
    out: CudaLinear
    #: Index of the layer's angles.
    rope: int
    head_norms: HeadNorms | None
    variant: AttentionVariant | None
    #: `[tokens, hidden]` to a new tensor: the feed-forward layer with its norm and residual.
    mlp: FeedForward

    def __call__(self, x: torch.Tensor, angles: Sequence[Angles], attend: Attend) -> torch.Tensor:
        assert isinstance(attend, PagedAttention)
        norm = self.attention_norm
        qkv = self.qkv.fused(x, norm=norm.weight, eps=norm.eps, plus_one=norm.plus_one)
        qkv = qkv.view(x.shape[0], -1, self.head_dim)
        attended = attend.project(self.index, qkv, angles[self.rope], self.head_norms, self.variant)
        return self.mlp(self.out.fused(attended, residual=x))
