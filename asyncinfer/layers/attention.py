"""Self-attention with packed projections over a paged KV cache, and what prepares its queries and
keys: a norm, the rotation."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TypeAlias

import torch
import torch.nn.functional as F

from asyncinfer.attention import AttentionVariant
from asyncinfer.kernels import ops
from asyncinfer.kernels.native import head_norm
from asyncinfer.layers.forward_pass import ForwardPass
from asyncinfer.layers.lora import LoraLinear
from asyncinfer.layers.norm import Norm
from asyncinfer.layers.rope import Angles

__all__ = [
    "HeadNorm",
    "Prepare",
    "ProjectionNorm",
    "Rotate",
    "RotatePart",
    "SelfAttention",
    "SharedAttention",
    "normed_first",
    "normed_last",
    "unrotated",
]

#: Prepares query and key heads `[tokens, heads, head_dim]` for attention: a norm and the
#: rotation.
Prepare: TypeAlias = "Callable[[torch.Tensor, Sequence[Angles]], torch.Tensor]"


class SelfAttention:
    """`[tokens, hidden]` to `[tokens, hidden]`. `qkv` is the packed projection: its output holds
    the query heads, then the key heads, then the value heads, where values are not made of keys.
    With `gated` a gate for each query head comes first: its sigmoid multiplies the head's
    output."""

    __slots__ = (
        *("gated", "head_dim", "heads", "kv_heads", "layer", "lends", "out", "prepare"),
        *("qkv", "temperature", "value_norm", "variant"),
    )

    def __init__(
        self,
        layer: int,
        heads: int,
        kv_heads: int,
        head_dim: int,
        qkv: LoraLinear,
        prepare: Prepare,
        out: LoraLinear,
        variant: AttentionVariant | None = None,
        gated: bool = False,
        temperature: int | None = None,
        value_norm: Norm | None = None,
        lends: bool = False,
    ) -> None:
        """`temperature` is the index of the forward pass' temperature for the queries. `lends`:
        later layers share its keys and values."""
        self.layer = layer
        self.heads = heads
        self.kv_heads = kv_heads
        self.head_dim = head_dim
        self.qkv = qkv
        self.prepare = prepare
        self.out = out
        self.variant = variant
        self.gated = gated
        self.temperature = temperature
        self.value_norm = value_norm
        self.lends = lends

    def __call__(self, x: torch.Tensor, forward: ForwardPass) -> torch.Tensor:
        adapters = forward.adapters
        qkv = self.qkv(x, adapters).view(x.shape[0], -1, self.head_dim)
        gate = None
        if self.gated:
            gate, qkv = qkv[:, : self.heads], qkv[:, self.heads :]
        prepared = self.heads + self.kv_heads
        qk = self.prepare(qkv[:, :prepared], forward.angles)
        # Values that share the keys' projection are its output before norm and rotation.
        q, k, v = qk[:, : self.heads], qk[:, self.heads :], qkv[:, -self.kv_heads :]
        if self.temperature is not None:
            q = q * forward.temperatures[self.temperature].to(q.dtype)
        if self.value_norm is not None:
            v = self.value_norm(v)
        if self.lends:
            forward.shared[self.layer] = k, v
        attended = forward.attends[self.layer](self.layer, q, k, v, self.variant)
        if gate is not None:
            attended = attended * gate.flatten(1).sigmoid()
        return self.out(attended, adapters)


class SharedAttention:
    """`SelfAttention` to the keys and values of the layer `source`, with queries of its own."""

    __slots__ = ("head_dim", "out", "prepare", "query", "source", "variant")

    def __init__(
        self,
        source: int,
        head_dim: int,
        query: LoraLinear,
        prepare: Prepare,
        out: LoraLinear,
        variant: AttentionVariant | None = None,
    ) -> None:
        self.source = source
        self.head_dim = head_dim
        self.query = query
        self.prepare = prepare
        self.out = out
        self.variant = variant

    def __call__(self, x: torch.Tensor, forward: ForwardPass) -> torch.Tensor:
        q = self.query(x, forward.adapters).view(x.shape[0], -1, self.head_dim)
        q = self.prepare(q, forward.angles)
        # They are in their pages already; this pass writes them once more.
        k, v = forward.shared[self.source]
        attended = forward.attends[self.source](self.source, q, k, v, self.variant)
        return self.out(attended, forward.adapters)


class Rotate:
    """Rotary position embedding by the angles at `index`."""

    __slots__ = ("index",)

    def __init__(self, index: int) -> None:
        self.index = index

    def __call__(self, qk: torch.Tensor, angles: Sequence[Angles]) -> torch.Tensor:
        return ops.rope(qk, *angles[self.index])


class RotatePart:
    """`Rotate` for the first `size` dimensions of each head only."""

    __slots__ = ("index", "size")

    def __init__(self, index: int, size: int) -> None:
        self.index = index
        self.size = size

    def __call__(self, qk: torch.Tensor, angles: Sequence[Angles]) -> torch.Tensor:
        rotated = ops.rope(qk[..., : self.size], *angles[self.index])
        return torch.cat((rotated, qk[..., self.size :]), dim=-1)


def unrotated(qk: torch.Tensor, angles: Sequence[Angles]) -> torch.Tensor:
    """Queries and keys unchanged: positions do not matter, or the embedding adds them."""
    return qk


class HeadNorm:
    """RMS norm of each query head, with the weight `q` `[head_dim]`, and of each key head, with the
    weight `k`, in float32."""

    def __init__(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        heads: int,
        kv_heads: int,
        eps: float,
        plus_one: bool,
    ) -> None:
        weight = torch.cat((q.expand(heads, -1), k.expand(kv_heads, -1))).float()
        self._weight = weight + 1 if plus_one else weight
        self._eps = eps

    def __call__(self, qk: torch.Tensor) -> torch.Tensor:
        found = head_norm(qk, self._weight, self._eps)
        if found is not None:
            return found
        normed = F.rms_norm(qk.float(), qk.shape[-1:], None, self._eps)
        return normed.mul_(self._weight).to(qk.dtype)


class ProjectionNorm:
    """A norm over all query heads together, and one over all key heads (OLMo-2)."""

    def __init__(self, q: Norm, k: Norm, heads: int) -> None:
        self._q = q
        self._k = k
        self._heads = heads

    def __call__(self, qk: torch.Tensor) -> torch.Tensor:
        q, k = qk[:, : self._heads].flatten(1), qk[:, self._heads :].flatten(1)
        return torch.cat((self._q(q), self._k(k)), dim=1).view(qk.shape)


def normed_first(norm: Norm, prepare: Prepare) -> Prepare:
    """`norm`, then `prepare`."""

    def both(qk: torch.Tensor, angles: Sequence[Angles]) -> torch.Tensor:
        return prepare(norm(qk), angles)

    return both


def normed_last(norm: Norm, prepare: Prepare) -> Prepare:
    """`prepare`, then `norm`."""

    def both(qk: torch.Tensor, angles: Sequence[Angles]) -> torch.Tensor:
        return norm(prepare(qk, angles))

    return both
