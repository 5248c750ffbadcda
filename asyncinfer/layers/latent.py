"""Multi-head latent attention (DeepSeek-V2, 2024)."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
import torch.nn.functional as F

from asyncinfer.attention import AttentionVariant, IndexedAttention, IndexQueries
from asyncinfer.kernels import ops
from asyncinfer.kernels.onednn import torch_is_slow
from asyncinfer.layers.forward_pass import ForwardPass
from asyncinfer.layers.lora import LoraLinear
from asyncinfer.layers.norm import Norm
from asyncinfer.layers.rope import Angles
from asyncinfer.quantization import Linear

__all__ = ["Indexer", "LatentAttention"]


class Indexer:
    """Queries, keys and weights with which a layer's tokens choose the tokens that they attend to
    (DeepSeek-V3.2, 2025). The first `rotated` dimensions of queries and keys are rotated."""

    def __init__(
        self,
        rope: int,
        rotated: int,
        query: Linear,
        key: Linear,
        key_norm: Norm,
        weights: torch.Tensor,
        size: int,
    ) -> None:
        """
        Args:
            rope: index of the angles to rotate by.
            query: of the small vector that attention's queries are made of, too.
            weights: float32 `[heads, hidden]`.
            size: dimensions of a query and of a key.
        """
        self._rope = rope
        self._rotated = rotated
        self._query = query
        self._key = key
        self._key_norm = key_norm
        # Both scales of a score are positive, so they can multiply its weight.
        self._weights = weights * (weights.shape[0] * size) ** -0.5
        self._size = size

    def __call__(
        self, x: torch.Tensor, small: torch.Tensor, angles: Sequence[Angles]
    ) -> tuple[IndexQueries, torch.Tensor]:
        """The queries of a choice, and the keys `[tokens, 1, size]`, for the layer's input
        `[tokens, hidden]` and the `small` vectors."""
        query = self._query(small).view(len(x), -1, self._size)
        both = torch.cat((query, self._key_norm(self._key(x))[:, None]), dim=1)
        turned = ops.rope(both[..., : self._rotated], *angles[self._rope])
        both = torch.cat((turned, both[..., self._rotated :]), dim=-1)
        asked = IndexQueries(both[:, :-1].float(), F.linear(x.float(), self._weights))
        return asked, both[:, -1:]


class LatentAttention:
    """`[tokens, hidden]` to `[tokens, hidden]`. The cache holds one vector per token: the latent
    vector, from which keys and values of all heads could be computed, and the rotated key that
    heads share.

    Keys and values are never computed: their projections are applied to the queries before
    attention and to its result after it, so that all heads attend to the latent vectors. With an
    indexer the cache also holds its key, and a token attends to the tokens that it chooses.
    """

    def __init__(
        self,
        layer: int,
        heads: int,
        rope: int | None,
        query_down: Callable[[torch.Tensor], torch.Tensor] | None,
        query: Callable[[torch.Tensor], torch.Tensor],
        kv_down: Linear,
        kv_norm: Norm,
        keys: torch.Tensor,
        values: torch.Tensor,
        out: LoraLinear,
        variant: AttentionVariant | None = None,
        temperature: int | None = None,
        indexer: Indexer | None = None,
    ) -> None:
        """
        Args:
            rope: index of the angles to rotate by; None: nothing is rotated.
            query_down: gives the small vector that queries are made of; None: they are made of the
                input.
            query: gives `[tokens, heads * (plain + rotated)]`.
            kv_down: gives `[tokens, rank + rotated]`.
            keys: `[heads, plain, rank]`, the projection from the latent vector to keys.
            values: `[heads, value, rank]`, the projection to values.
            temperature: index of the forward pass' temperature for the queries.
        """
        self._layer = layer
        self._heads = heads
        self._rope = rope
        self._query_down = query_down
        self._query = query
        self._kv_down = kv_down
        self._kv_norm = kv_norm
        self._keys = _fast(keys.contiguous())
        self._values = _fast(values.transpose(1, 2).contiguous())
        self._out = out
        self._variant = variant
        self._temperature = temperature
        self._indexer = indexer

    def __call__(self, x: torch.Tensor, forward: ForwardPass) -> torch.Tensor:
        tokens, (_, plain, rank) = x.shape[0], self._keys.shape
        small = x if self._query_down is None else self._query_down(x)
        query = self._query(small).view(tokens, self._heads, -1)
        down = self._kv_down(x)
        latent = self._kv_norm(down[:, :rank].contiguous())
        rotated = torch.cat((query[:, :, plain:], down[:, None, rank:]), dim=1)
        if self._rope is not None:
            rotated = ops.rope(rotated, *forward.angles[self._rope])
        absorbed = _products(query[:, :, :plain], self._keys)
        q = torch.cat((absorbed, rotated[:, : self._heads]), dim=-1)
        if self._temperature is not None:
            q = q * forward.temperatures[self._temperature].to(q.dtype)
        k = torch.cat((latent[:, None], rotated[:, self._heads :]), dim=-1)
        attend = forward.attends[self._layer]
        if self._indexer is None:
            seen = attend(self._layer, q, k, k, self._variant)
        else:
            asked, keys = self._indexer(x, small, forward.angles)
            k = torch.cat((k, keys), dim=-1)
            assert isinstance(attend, IndexedAttention)
            seen = attend(self._layer, q, k, k, self._variant, asked)
        seen = seen.view(tokens, self._heads, -1)
        values = _products(seen[:, :, :rank], self._values)
        return self._out(values.flatten(1), forward.adapters)


def _fast(weights: torch.Tensor) -> torch.Tensor:
    """The weights in the dtype in which torch multiplies them fast."""
    return weights.float() if torch_is_slow(weights) else weights


def _products(x: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
    """`x` `[tokens, heads, in]` times each head's matrix of `weights` `[heads, in, out]`."""
    return torch.bmm(x.transpose(0, 1).to(weights.dtype), weights).transpose(0, 1).to(x.dtype)
