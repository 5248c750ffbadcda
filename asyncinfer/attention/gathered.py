"""Attention in torch's own operators: the pages of a row are gathered into a contiguous tensor,
then attended to densely. Where memory allows, `contiguous.py` keeps the copies."""

from __future__ import annotations

from collections.abc import Iterable
from functools import cached_property

import torch

from asyncinfer.attention.batch import AttentionBatch
from asyncinfer.attention.contiguous import ContiguousKV
from asyncinfer.attention.decode import (
    DecodeGroup,
    decode_groups,
    few_rows,
    group_rows,
)
from asyncinfer.attention.kv import KVCache
from asyncinfer.attention.native import native_rows
from asyncinfer.attention.prefill import PrefillRow, native_prefill, prefill_rows
from asyncinfer.attention.row_copies import find_copies
from asyncinfer.attention.variant import AttentionVariant
from asyncinfer.attention.varied import VariedAttention
from asyncinfer.kernels.native import kv_write

__all__ = ["GatheredAttention"]


class GatheredAttention:
    """Attention of one forward pass: indices and masks are made once and serve every layer.

    Rows of few query tokens are gathered in a few groups of similar length, without Python
    code per row; longer rows are gathered one by one. It runs on any device and is tuned for CPUs.
    """

    def __init__(
        self, kv: KVCache, batch: AttentionBatch, scale: float, *, native: bool = True
    ) -> None:
        """`native`: whether native code may read the pages of rows with few query tokens, and take
        more of them than torch's operators for chunks would."""
        self._kv = kv
        self._batch = batch
        self._scale = scale
        self._native = native_rows(kv, batch, scale) if native else None
        self._may_be_native = native
        #: Query heads, from the first layer on.
        self._heads = 0
        self._slots = _slot_index(kv, batch)
        # One buffer serves the whole pass. It stays in the processor's cache, and its
        # memory does not go back to the system between layers.
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
        native, self._heads = self._native, q.shape[1]
        if native is not None and native.tokens is None and variant is None:
            written = native.write(layer, k, v, self._halves)
            attended = native(layer, q) if written else None
            if attended is not None:
                self._drop_copies()
                return attended
        new = k[None] if self._kv.storage.shape[1] == 1 else torch.stack((k, v))
        self._write(layer, new)
        if variant is not None:
            return self._vary(variant.window)(layer, q, variant, self._pages)
        attended = None if native is None else native(layer, q)
        if native is None or attended is None:
            if native is not None:
                self._leave_native()
            if self._whole:
                return self.groups[0](layer, q, new, self._pages)
            out = q.new_empty(q.shape[0], q.shape[1] * q.shape[2])
        elif native.tokens is None:
            self._drop_copies()
            return attended
        else:
            out = q.new_empty(q.shape[0], q.shape[1] * q.shape[2])
            out.index_copy_(0, native.tokens, attended)
        for group in self.groups:
            tokens = group.tokens
            if tokens is None:
                count = group.size
                out[:count] = group(layer, q[:count], new[:, :count], self._pages)
            else:
                attended = group(
                    layer, q.index_select(0, tokens), new.index_select(1, tokens), self._pages
                )
                out.index_copy_(0, tokens, attended)
        for row in self._prefill:
            row(layer, q, new, self._pages, out)
        return out

    def _write(self, layer: int, new: torch.Tensor) -> None:
        """Put `new` `[parts, tokens, kv_heads, head_dim]` into its pages."""
        kv = self._kv
        if kv.format.exact and self._may_be_native:
            (pages,) = kv.pages[layer]
            parts = zip(new, self._slots.chunk(len(new)), strict=True)
            if all(kv_write(pages, each, slots) for each, slots in parts):
                return
        stored = (new,) if kv.format.exact else kv.format.encode(new)
        for pages, encoded in zip(kv.pages[layer], stored, strict=True):
            width = pages.shape[-1]
            pages.view(-1, width).index_copy_(0, self._slots, encoded.reshape(-1, width))

    def _leave_native(self) -> None:
        """Let torch attend from now on, in all layers: also for the rows that native code computed
        in earlier layers, whose groups are created without these."""
        self._native = None
        for name in ("_few", "_grouped", "_copies", "groups", "_prefill", "_whole"):
            self.__dict__.pop(name, None)

    def _drop_copies(self) -> None:
        if self._kv.contiguous.groups:
            # Native code writes to pages alone, so copies of the rows would lack this pass' tokens.
            find_copies(self._kv, self._batch, [], [])

    # Created on first use, since layers that all have a variant need none of them.

    @cached_property
    def _decoding(self) -> list[int]:
        """Rows with few query tokens."""
        kv, code = self._kv, None
        if self._may_be_native:
            group = self._heads // kv.storage.shape[3]
            code = native_prefill(kv.storage.device, kv.dtype, kv.head_dim, group, self._scale)
        return few_rows(self._batch, chunk_code=code is not None)

    @cached_property
    def _few(self) -> list[int]:
        """Rows with few query tokens that native code does not compute."""
        native = frozenset(self._native.rows) if self._native else frozenset()
        return [row for row in self._decoding if row not in native]

    @cached_property
    def _halves(self) -> tuple[torch.Tensor, torch.Tensor]:
        """The slots of keys, and those of values."""
        keys, values = self._slots.chunk(2)
        return keys, values

    @cached_property
    def groups(self) -> list[DecodeGroup]:
        groups = decode_groups(
            self._kv, self._batch, self._scale, self._grouped, self._copies[: len(self._grouped)]
        )
        self._make_room(group.kv.buffered for group in groups)
        return groups

    @cached_property
    def _grouped(self) -> list[list[int]]:
        return group_rows(self._batch, self._few)

    @cached_property
    def _chunks(self) -> list[int]:
        """The rows with more query tokens."""
        few = frozenset(self._decoding)
        return [row for row in range(len(self._batch.counts)) if row not in few]

    @cached_property
    def _copies(self) -> list[ContiguousKV | None]:
        return find_copies(self._kv, self._batch, self._grouped, self._chunks)

    @cached_property
    def _whole(self) -> bool:
        """Whether one group takes all tokens as they lie."""
        return not self._prefill and len(self.groups) == 1 and self.groups[0].in_order

    @cached_property
    def _prefill(self) -> list[PrefillRow]:
        if not self._chunks:
            return []
        copies = self._copies[len(self._grouped) :]
        rows = prefill_rows(self._kv, self._batch, self._scale, self._chunks, copies)
        self._make_room(row.buffered for row in rows)
        return rows

    def _make_room(self, sizes: Iterable[int]) -> None:
        """Let the buffer take a gather of each of these sizes."""
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
    """Zero the blocks of which this step writes only the first tokens.

    Dense attention reads a row's last block to its end, and multiplies values past the row by zero.
    A NaN that an earlier sequence left there would survive this (0 * NaN). So a block holds only
    zeros and values of its own sequence. Native code needs this, too: a later step in the same
    block may have more query tokens than native code takes.
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
