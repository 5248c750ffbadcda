"""Attention of decode rows that a graph can record: no shape depends on a tensor's contents.

It reads every block of the tables, and masks the keys beyond a row. So it costs the whole width of
the tables. It is the slow twin of the paged kernels on decode rows.
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
    """Attention of one forward pass over rows of one query token each."""

    def __init__(self, kv: KVCache, batch: DeviceBatch, scale: float) -> None:
        self._kv = kv
        self._scale = scale
        self._gather = Gather(kv, batch.block_tables.clamp(min=0).long())
        device = kv.storage.device
        self._buffer = torch.empty(self._gather.size, dtype=kv.dtype, device=device)
        size = batch.block_size
        #: Positions of the keys, int32 `[1, width]`, and of the row's own token, `[rows, 1]`.
        width = batch.block_tables.shape[1] * size
        self._keys = torch.arange(width, dtype=torch.int32, device=device)[None]
        self._own = batch.seq_lens[:, None] - 1
        slots = batch.slot_mapping
        self._written = (slots >= 0)[:, None, None, None]
        # Padding rows come last. They repeat the write of the first row.
        self._block = torch.where(slots >= 0, slots, slots[:1]).clamp(min=0) // size
        self._after = torch.arange(size, device=slots.device) - (slots % size)[:, None]

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
        """Write each row's token into its block, and zeros behind it. `GatheredAttention` relies on
        the zeros when it reads the block next."""
        before = pages[self._block]
        after = self._after[:, None, :, None]
        filled = torch.where(after == 0, new[:, :, None], before).masked_fill(after > 0, 0)
        first = torch.where(self._written[:1], filled[:1], before[:1])
        pages[self._block] = torch.where(self._written, filled, first)
