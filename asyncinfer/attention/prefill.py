"""Attention of a row with many query tokens: a chunk of a prompt."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate

import torch
import torch.nn.functional as F

from asyncinfer.attention.batch import AttentionBatch
from asyncinfer.attention.gather import Gather
from asyncinfer.attention.kv import KVCache
from asyncinfer.attention.products import attend_by_products, has_faster_product
from asyncinfer.kernels.threads import FEW_TILES, share

__all__ = ["PrefillRow", "prefill_rows"]

#: Most numbers in a tile's mask.
_TILE_MASK = 1 << 21
#: A row with at most this many scores per head is one call: calls of tiles would cost more.
_SMALL = 1 << 13


class PrefillRow:
    """One row's causal attention over all of its sequence so far."""

    def __init__(
        self, kv: KVCache, batch: AttentionBatch, row: int, first: int, scale: float
    ) -> None:
        self._scale = scale
        self._start = batch.starts[row]
        self._end = self._start + batch.counts[row]
        self._tokens = slice(first, first + batch.counts[row])
        #: None for a sequence's first tokens, which see nothing cached. An inexact format needs it
        #: always: every token must see a token's KV as the cache stores it.
        self.gather: Gather | None = None
        if self._start or not kv.format.exact:
            blocks = -(-self._end // batch.block_size)
            self.gather = Gather(kv, batch.block_tables[row : row + 1, :blocks].long())

    def __call__(
        self,
        layer: int,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        buffer: torch.Tensor,
        out: torch.Tensor,
    ) -> None:
        """Attend with this row's tokens of `q` `[tokens, heads, head_dim]`, whose keys and values
        are in the cache and in `k` and `v`; fill its tokens of `out` `[tokens, heads * head_dim]`.
        `buffer` takes the gathered pages."""
        if self.gather is None:
            keys = k[self._tokens].transpose(0, 1).contiguous()
            values = v[self._tokens].transpose(0, 1).contiguous()
        else:
            keys, values = self.gather(layer, buffer)[:, 0, :, : self._end]
        queries = q[self._tokens]
        result = out[self._tokens].view(-1, k.shape[1], q.shape[1] // k.shape[1], q.shape[2])
        small = queries.shape[0] * self._end <= _SMALL
        if q.device.type == "cpu" and not small and has_faster_product(q.dtype):
            attend_by_products(queries, keys, values, self._start, self._scale, result)
        elif self._start:
            _attend(queries, keys, values, self._start, self._scale, result)
        else:
            _attend_from_start(queries, keys, values, self._scale, result)


def prefill_rows(
    kv: KVCache, batch: AttentionBatch, scale: float, rows: Sequence[int]
) -> list[PrefillRow]:
    """These rows of `batch`."""
    bounds = list(accumulate(batch.counts, initial=0))
    return [PrefillRow(kv, batch, row, bounds[row], scale) for row in rows]


def _attend_from_start(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scale: float, out: torch.Tensor
) -> None:
    """torch's causal attention of a sequence's first tokens. It skips the scores above the
    diagonal, but only where queries and keys begin at the same token."""
    tokens, kv_heads, group, head_dim = out.shape
    grouped = q.view(tokens, kv_heads, group, head_dim).permute(1, 2, 0, 3)
    keys = k[:, None].expand(-1, group, -1, -1)
    values = v[:, None].expand(-1, group, -1, -1)
    whole = F.scaled_dot_product_attention(grouped, keys, values, is_causal=True, scale=scale)
    out.copy_(whole.permute(2, 0, 1, 3))


def _attend(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    start: int,
    scale: float,
    out: torch.Tensor,
) -> None:
    """torch's attention, in tiles of queries: a tile bounds the size of its mask."""
    tokens, kv_heads, group, head_dim = out.shape
    grouped = q.view(tokens, kv_heads, group, head_dim).permute(1, 2, 0, 3)
    keys = k[:, None].expand(-1, group, -1, -1)
    values = v[:, None].expand(-1, group, -1, -1)
    step = max(16, _TILE_MASK // k.shape[1])

    def attend(first: int) -> None:
        last = min(first + step, tokens)
        end = start + last
        mask = q.new_full((last - first, end), float("-inf")).triu_(start + first + 1)
        tile = F.scaled_dot_product_attention(
            grouped[:, :, first:last], keys[:, :, :end], values[:, :, :end], mask, scale=scale
        )
        out[first:last] = tile.permute(2, 0, 1, 3)

    firsts = range(0, tokens, step)
    alone = q.device.type != "cpu" or len(firsts) <= FEW_TILES
    # The last tiles have most keys, and so come first.
    share(reversed(firsts), attend, alone=alone)
