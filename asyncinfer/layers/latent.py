"""Multi-head latent attention (DeepSeek-V2, 2024)."""

from __future__ import annotations

from collections.abc import Callable

import torch

from asyncinfer.attention import AttentionVariant
from asyncinfer.kernels import ops
from asyncinfer.layers.forward_pass import ForwardPass
from asyncinfer.layers.lora import LoraLinear
from asyncinfer.layers.norm import Norm
from asyncinfer.quantization import Linear

__all__ = ["LatentAttention"]


class LatentAttention:
    """`[tokens, hidden]` to `[tokens, hidden]`. The cache holds one vector per token: the latent
    vector, from which keys and values of all heads could be computed, and the rotated key that
    heads share.

    Keys and values are never computed: their projections are applied to the queries before
    attention and to its result after it, so that all heads attend to the latent vectors.
    """

    def __init__(
        self,
        layer: int,
        heads: int,
        rope: int,
        query: Callable[[torch.Tensor], torch.Tensor],
        kv_down: Linear,
        kv_norm: Norm,
        keys: torch.Tensor,
        values: torch.Tensor,
        out: LoraLinear,
        variant: AttentionVariant | None = None,
        temperature: int | None = None,
    ) -> None:
        """
        Args:
            rope: index of the angles to rotate by.
            query: gives `[tokens, heads * (plain + rotated)]`.
            kv_down: gives `[tokens, rank + rotated]`.
            keys: `[heads, plain, rank]`, the projection from the latent vector to keys.
            values: `[heads, value, rank]`, the projection to values.
            temperature: index of the forward pass' temperature for the queries.
        """
        self._layer = layer
        self._heads = heads
        self._rope = rope
        self._query = query
        self._kv_down = kv_down
        self._kv_norm = kv_norm
        self._keys = keys.contiguous()
        self._values = values.transpose(1, 2).contiguous()
        self._out = out
        self._variant = variant
        self._temperature = temperature

    def __call__(self, x: torch.Tensor, forward: ForwardPass) -> torch.Tensor:
        tokens, (_, plain, rank) = x.shape[0], self._keys.shape
        query = self._query(x).view(tokens, self._heads, -1)
        down = self._kv_down(x)
        latent = self._kv_norm(down[:, :rank].contiguous())
        rotated = torch.cat((query[:, :, plain:], down[:, None, rank:]), dim=1)
        rotated = ops.rope(rotated, *forward.angles[self._rope])
        absorbed = torch.bmm(query[:, :, :plain].transpose(0, 1), self._keys).transpose(0, 1)
        q = torch.cat((absorbed, rotated[:, : self._heads]), dim=-1)
        if self._temperature is not None:
            q = q * forward.temperatures[self._temperature].to(q.dtype)
        k = torch.cat((latent[:, None], rotated[:, self._heads :]), dim=-1)
        seen = forward.attends[self._layer](self._layer, q, k, k, self._variant)
        seen = seen.view(tokens, self._heads, -1)
        values = torch.bmm(seen[:, :, :rank].transpose(0, 1), self._values)
        return self._out(values.transpose(0, 1).flatten(1), forward.adapters)
