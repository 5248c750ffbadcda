"""Attention of rows with one query token, batched over rows of similar length."""

from __future__ import annotations

import torch
import torch.nn.functional as F

from asyncinfer.attention.batch import AttentionBatch
from asyncinfer.attention.gather import Gather
from asyncinfer.attention.kv import KVCache

__all__ = ["DecodeGroup", "decode_groups"]

#: A group is closed when its rows' padding passes this share of their tokens ...
_PADDING = 0.25
#: ... and this many tokens: about what gathering costs, against the calls of one more group.
_PADDED_TOKENS = 128
#: Bytes of one gather: it should still be in the processor's cache when it is attended to.
_GATHER_BYTES = 4 << 20


class DecodeGroup:
    """Some decode rows, padded to the longest of them."""

    def __init__(
        self, kv: KVCache, batch: AttentionBatch, rows: list[int] | None, scale: float
    ) -> None:
        device = batch.block_tables.device
        members = range(batch.decode_rows) if rows is None else rows
        lengths = [batch.starts[row] + 1 for row in members]
        self.length = max(lengths)
        #: int64 `[n]`: the group's rows; None means every decode row, in order.
        self.rows = None if rows is None else torch.tensor(rows, device=device)
        self._count = len(lengths)
        self._scale = scale

        blocks = -(-self.length // batch.block_size)
        tables = batch.block_tables[: batch.decode_rows, :blocks].long()
        if self.rows is not None:
            tables = tables.index_select(0, self.rows)
        ends = torch.tensor(lengths, device=device)[:, None]
        used = torch.arange(blocks, device=device) * batch.block_size < ends
        # What pads a row must be finite, so it is the row's own first block.
        tables = torch.where(used, tables, tables[:, :1])
        self.gather = Gather(kv, tables)
        self._mask: torch.Tensor | None = None
        if min(lengths) < self.length:
            past = torch.arange(self.length, device=device) >= ends
            mask = torch.zeros(past.shape, dtype=kv.dtype, device=device)
            self._mask = mask.masked_fill_(past, float("-inf"))[:, None, None]

    def __call__(self, layer: int, q: torch.Tensor, buffer: torch.Tensor) -> torch.Tensor:
        """Attend with the group's queries `[n, heads, head_dim]`; gives `[n, heads * head_dim]`.
        `buffer` takes the gathered pages."""
        k, v = self.gather(layer, buffer)[:, :, :, : self.length]
        # The query heads that share a KV head stand as query tokens: nothing is repeated.
        grouped = q.view(self._count, k.shape[1], -1, k.shape[3])
        out = F.scaled_dot_product_attention(grouped, k, v, self._mask, scale=self._scale)
        return out.reshape(self._count, -1)


def decode_groups(kv: KVCache, batch: AttentionBatch, scale: float) -> list[DecodeGroup]:
    """The decode rows of `batch`, longest first, cut where padding or a gather grows large."""
    kv_heads, _, head_dim = kv.storage.shape[3:]
    budget = _GATHER_BYTES // (2 * kv_heads * head_dim * kv.dtype.itemsize)
    groups: list[list[int]] = []
    tokens = longest = 0
    for row in sorted(range(batch.decode_rows), key=batch.starts.__getitem__, reverse=True):
        length = batch.starts[row] + 1
        if groups:
            padded = longest * (len(groups[-1]) + 1)
            padding = padded - tokens - length
            roomy = padding <= max(_PADDED_TOKENS, _PADDING * tokens)
            if roomy and padded <= budget:
                groups[-1].append(row)
                tokens += length
                continue
        groups.append([row])
        tokens = longest = length
    if len(groups) == 1:
        return [DecodeGroup(kv, batch, None, scale)]
    return [DecodeGroup(kv, batch, rows, scale) for rows in groups]
