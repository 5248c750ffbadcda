"""Attention in torch's own operators: the pages a row uses are put side by side, then attended to
densely. Those of decode rows stay so, where there is room (`mirror.py`)."""

from __future__ import annotations

from collections.abc import Iterable
from functools import cached_property

import torch

from asyncinfer.attention.batch import AttentionBatch
from asyncinfer.attention.decode import DecodeGroup, decode_groups
from asyncinfer.attention.kv import KVCache
from asyncinfer.attention.prefill import PrefillRow, prefill_rows
from asyncinfer.attention.variant import AttentionVariant
from asyncinfer.attention.varied import VariedAttention

__all__ = ["GatheredAttention"]


class GatheredAttention:
    """Attention of one forward pass: indices and masks are made once and serve every layer.

    Decode rows are gathered in a few groups of similar length, without a step of Python per row;
    longer rows one by one. Runs on any device; tuned for CPUs.
    """

    def __init__(self, kv: KVCache, batch: AttentionBatch, scale: float) -> None:
        self._kv = kv
        self._batch = batch
        self._scale = scale
        self._decode_rows = batch.decode_rows
        self._slots = _slot_index(kv, batch)
        # One buffer for the whole pass: it stays in the processor's cache, and pages of a large
        # one are not returned to the system and faulted in again layer after layer.
        self._pages = torch.empty(0, dtype=kv.dtype, device=kv.storage.device)
        #: By window: made when a layer first asks for it.
        self._varied: dict[int | None, VariedAttention] = {}
        _clear_begun_blocks(kv, batch)

    def __call__(
        self,
        layer: int,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        variant: AttentionVariant | None = None,
    ) -> torch.Tensor:
        new = k[None] if self._kv.storage.shape[1] == 1 else torch.stack((k, v))
        for pages, its in zip(self._kv.pages[layer], self._kv.format.encode(new), strict=True):
            width = pages.shape[-1]
            pages.view(-1, width).index_copy_(0, self._slots, its.reshape(-1, width))
        if variant is not None:
            return self._vary(variant.window)(layer, q, variant, self._pages)
        if not self._prefill and len(self._groups) == 1:
            return self._groups[0](layer, q, new, self._pages)
        out = q.new_empty(q.shape[0], q.shape[1] * q.shape[2])
        decoded = out[: self._decode_rows]
        queries, tokens = q[: self._decode_rows], new[:, : self._decode_rows]
        for group in self._groups:
            if group.rows is None:
                decoded.copy_(group(layer, queries, tokens, self._pages))
            else:
                rows = group.rows
                attended = group(
                    layer, queries.index_select(0, rows), tokens.index_select(1, rows), self._pages
                )
                decoded.index_copy_(0, rows, attended)
        for row in self._prefill:
            row(layer, q, new[0], new[-1], self._pages, out)
        return out

    # Where every layer has a variant, these are never made.

    @cached_property
    def _groups(self) -> list[DecodeGroup]:
        groups = decode_groups(self._kv, self._batch, self._scale)
        self._make_room(group.buffered for group in groups)
        return groups

    @cached_property
    def _prefill(self) -> list[PrefillRow]:
        rows = prefill_rows(self._kv, self._batch, self._scale)
        self._make_room(row.gather.size for row in rows if row.gather is not None)
        return rows

    def _make_room(self, sizes: Iterable[int]) -> None:
        """See that gathers of these sizes fit the buffer."""
        size = max(sizes, default=0)
        if size > self._pages.numel():
            self._pages = self._pages.new_empty(size)

    def _vary(self, window: int | None) -> VariedAttention:
        varied = self._varied.get(window)
        if varied is None:
            varied = VariedAttention(self._kv, self._batch, self._scale, window)
            self._varied[window] = varied
            self._make_room((varied.size,))
        return varied


def _slot_index(kv: KVCache, batch: AttentionBatch) -> torch.Tensor:
    """int64 `[parts * tokens * kv_heads]`: where each token's heads lie in a layer's keys and
    values, seen as `[parts * num_blocks * kv_heads * block_size, width]`."""
    parts, blocks, kv_heads, size = kv.storage.shape[1:5]
    slot = batch.slot_mapping
    base = (slot // size) * (kv_heads * size) + slot % size
    head = torch.arange(0, kv_heads * size, size, device=slot.device)
    part = torch.arange(0, parts * blocks * kv_heads * size, blocks * kv_heads * size)
    return (part.to(slot.device)[:, None, None] + base[:, None] + head).flatten()


def _clear_begun_blocks(kv: KVCache, batch: AttentionBatch) -> None:
    """Zero the blocks this step writes only the first tokens of.

    The dense products below read a row's last block to its end, with weights of zero for what lies
    past the row. A NaN that an earlier tenant left there would survive that (0 * NaN), so a block
    holds nothing but zeros and its own sequence's values from its first token on.
    """
    size = batch.block_size
    ends = [start + count for start, count in zip(batch.starts, batch.counts, strict=True)]
    begun = [
        (row, end // size)
        for row, (start, end) in enumerate(zip(batch.starts, ends, strict=True))
        if end % size and end // size * size >= start
    ]
    if begun:
        where = torch.tensor(begun, device=batch.block_tables.device)
        blocks = batch.block_tables[where[:, 0], where[:, 1]].long()
        kv.clear(blocks)
