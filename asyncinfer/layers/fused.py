"""`FusedLayer`: one layer of the decoder in few launches of a GPU."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from asyncinfer.attention import AttentionVariant, HeadNorms, PagedAttention
from asyncinfer.kernels import ops
from asyncinfer.kernels.linear_tiles import SMALL_TOKENS
from asyncinfer.layers.attention import Prepare
from asyncinfer.layers.block import FeedForward
from asyncinfer.layers.forward_pass import ForwardPass
from asyncinfer.layers.lora import LoraRows
from asyncinfer.layers.norm import RMSNorm
from asyncinfer.quantization import CudaLinear

__all__ = ["FusedLayer", "FusedMLP", "NormedExperts"]


@dataclass(frozen=True, slots=True, kw_only=True)
class FusedMLP:
    """`x + mlp(norm(x))` of a gated MLP, in two launches where tokens are few."""

    #: Before the names of its linear layers in the tensor table, as "layers.0.mlp".
    name: str
    norm: RMSNorm
    #: The packed gate and up, and down; the activation by its name in `ops.linear_small`.
    up: CudaLinear
    down: CudaLinear
    activation: str

    def __call__(self, x: torch.Tensor, adapters: LoraRows | None = None) -> torch.Tensor:
        norm = self.norm
        if adapters is not None:
            return self.of_normed(x, norm(x), adapters)
        gated = self.up.fused(
            x, norm=norm.weight, eps=norm.eps, plus_one=norm.plus_one, activation=self.activation
        )
        return self.down.fused(gated, residual=x)

    def of_normed(
        self, x: torch.Tensor, normed: torch.Tensor, adapters: LoraRows | None
    ) -> torch.Tensor:
        """The layer's call, with `norm(x)` given as `normed`. Adapters are added between a product
        and its gate, which are separate launches then."""
        if adapters is None:
            gated = self.up.fused(normed, activation=self.activation)
            return self.down.fused(gated, residual=x)
        y = self.up(normed)
        adapters.add(f"{self.name}.up", normed, y)
        if self.activation == "silu":
            gated = ops.silu_mul(y)
        else:
            tanh = self.activation == "gelu_tanh"
            gated = ops.gelu_mul(y, approximate="tanh" if tanh else "none")
        y = self.down.fused(gated, residual=x)
        adapters.add(f"{self.name}.down", gated, y)
        return y


@dataclass(frozen=True, slots=True)
class NormedExperts:
    """`x + experts(norm(x))` of a mixture of experts."""

    norm: RMSNorm
    experts: FeedForward

    def __call__(self, x: torch.Tensor, adapters: LoraRows | None = None) -> torch.Tensor:
        return self.of_normed(x, self.norm(x), adapters)

    def of_normed(
        self, x: torch.Tensor, normed: torch.Tensor, adapters: LoraRows | None
    ) -> torch.Tensor:
        """The layer's call, with `norm(x)` given as `normed`."""
        return self.experts(normed, adapters).add_(x)


@dataclass(frozen=True, slots=True, kw_only=True)
class FusedLayer:
    """A `DecoderLayer` of the most common kind: RMS norms before attention and before a gated MLP
    or experts, heads that are rotated.

    With an MLP six launches where tokens are few: norm and packed projection; head norms, rotation
    and KV write; attention; output projection and residual; norm, packed projection and gate; down
    projection and residual. Above 64 tokens norms and gates are launches of their own, and the one
    after attention adds the residual, too.
    """

    index: int
    kv_heads: int
    head_dim: int
    attention_norm: RMSNorm
    #: The packed projection, and attention's output projection.
    qkv: CudaLinear
    out: CudaLinear
    #: Index of the layer's angles.
    rope: int
    head_norms: HeadNorms | None
    #: The head norms and the rotation by torch's operators.
    prepare: Prepare
    variant: AttentionVariant | None
    #: `[tokens, hidden]` to a new tensor: the feed-forward layer with its norm and residual.
    mlp: FusedMLP | NormedExperts

    def __call__(self, x: torch.Tensor, forward: ForwardPass) -> torch.Tensor:
        attend, adapters = forward.attends[self.index], forward.adapters
        norm = self.attention_norm
        if adapters is None:
            qkv = self.qkv.fused(x, norm=norm.weight, eps=norm.eps, plus_one=norm.plus_one)
        else:
            normed = norm(x)
            qkv = self.qkv(normed)
            adapters.add(f"layers.{self.index}.attention.qkv", normed, qkv)
        qkv = qkv.view(x.shape[0], -1, self.head_dim)
        if isinstance(attend, PagedAttention):
            angles = forward.angles[self.rope]
            attended = attend.project(self.index, qkv, angles, self.head_norms, self.variant)
        else:
            # An engine that has dropped Triton's kernels attends with torch's operators.
            qk, v = qkv[:, : -self.kv_heads], qkv[:, -self.kv_heads :]
            qk = self.prepare(qk, forward.angles)
            q, k = qk[:, : -self.kv_heads], qk[:, -self.kv_heads :]
            attended = attend(self.index, q, k, v, self.variant)
        few = x.shape[0] <= SMALL_TOKENS
        y = self.out.fused(attended, residual=x if few else None)
        if adapters is not None:
            adapters.add(f"layers.{self.index}.attention.out", attended, y)
        if few:
            return self.mlp(y, adapters)
        norm = self.mlp.norm
        y, normed = ops.add_rms_norm(y, x, norm.weight, norm.eps, plus_one=norm.plus_one)
        return self.mlp.of_normed(y, normed, adapters)
