"""Attention that a CUDA graph can record: no shape depends on a tensor's contents.

It reads every block of each token's table, and masks the keys that the token may not see, so its
cost grows with the width of the tables. It is the slow reference of the paged kernels.
"""

from __future__ import annotations

import torch

from asyncinfer.attention.batch import DeviceBatch
from asyncinfer.attention.gather import Gather
from asyncinfer.attention.kv import KVCache
from asyncinfer.attention.variant import AttentionVariant

__all__ = ["MaskedAttention"]

_PLAIN = AttentionVariant()


class MaskedAttention:
    """Attention of one forward pass in which every token belongs to a row."""

    def __init__(self, kv: KVCache, batch: DeviceBatch, scale: float) -> None:
        self._kv = kv
        self._scale = scale
        slots = batch.slot_mapping
        device = slots.device
        ends = batch.query_starts[1:]
        token = torch.arange(len(slots), dtype=torch.int32, device=device)
        row = torch.searchsorted(ends, token, right=True)
        tables = batch.block_tables.index_select(0, row)
        self._gather = Gather(kv, tables.clamp(min=0).long())
        self._buffer = torch.empty(self._gather.size, dtype=kv.dtype, device=device)
        size = batch.block_size
        #: Positions of the keys, int32 `[1, width]`, and of the tokens, `[tokens, 1]`.
        width = tables.shape[1] * size
        self._keys = torch.arange(width, dtype=torch.int32, device=device)[None]
        after = ends.index_select(0, row) - token
        self._own = (batch.seq_lens.index_select(0, row) - after)[:, None]
        self._written = slots >= 0
        # Tokens that are not stored repeat the write of the first stored one.
        self._first = (slots >= 0).int().argmax().view(1)
        first = slots.index_select(0, self._first)
        self._places = torch.where(slots >= 0, slots, first).clamp(min=0)
        self._block = self._places // size
        self._after = torch.arange(size, device=device) - (slots % size)[:, None]

    def __call__(
        self,
        layer: int,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        variant: AttentionVariant | None = None,
    ) -> torch.Tensor:
        variant = variant or _PLAIN
        for pages, new in self._kv.encoded(layer, k, v):
            self._write(pages, new)
        rows, heads, head_dim = q.shape
        hidden = self._keys > self._own
        if variant.window is not None:
            hidden = hidden | (self._keys <= self._own - variant.window)
        keys, values = self._gather(layer, self._buffer).unbind()
        values.masked_fill_(hidden[:, None, :, None], 0.0)
        kv_heads = keys.shape[1]
        grouped = q.reshape(rows, kv_heads, heads // kv_heads, head_dim)
        scores = (grouped @ keys.transpose(2, 3)).float() * self._scale
        if variant.softcap is not None:
            scores = (scores / variant.softcap).tanh() * variant.softcap
        scores = scores.masked_fill(hidden[:, None, None], float("-inf"))
        if variant.sinks is not None:
            sinks = variant.sinks.view(1, kv_heads, -1, 1).expand(rows, -1, -1, 1)
            scores = torch.cat((scores, sinks), dim=-1)
        # A row without keys has no weights.
        weights = scores.softmax(dim=-1).nan_to_num(0.0)[..., : hidden.shape[1]]
        return (weights.to(q.dtype) @ values).view(rows, heads * head_dim)

    def _write(self, pages: torch.Tensor, new: torch.Tensor) -> None:
        """Write each token into its block, with zeros behind it, on which `GatheredAttention`
        relies."""
        before = pages[self._block]
        behind = self._after[:, None, :, None] > 0
        pages[self._block] = self._stored(before.masked_fill(behind, 0), before)
        # Tokens of one block overwrite each other with zeros, so each is written again.
        by_token, at = pages.transpose(1, 2), self._places % pages.shape[2]
        before = by_token[self._block, at]
        by_token[self._block, at] = self._stored(new, before)

    def _stored(self, new: torch.Tensor, before: torch.Tensor) -> torch.Tensor:
        """What each token writes, `[tokens, ...]`: `new`, or `before` if it is not stored."""
        shape = (-1, *[1] * (new.ndim - 1))
        written = self._written.view(shape)
        first = torch.where(written, new, before).index_select(0, self._first)
        return torch.where(written, new, first)
