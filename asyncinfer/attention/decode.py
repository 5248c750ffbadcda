"""Attention of rows with one query token, batched over rows of similar length."""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import cached_property

import torch
import torch.nn.functional as F

from asyncinfer.attention.batch import AttentionBatch
from asyncinfer.attention.gather import Gather
from asyncinfer.attention.kv import KVCache
from asyncinfer.attention.mirror import Mirror

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
        self,
        kv: KVCache,
        batch: AttentionBatch,
        rows: list[int],
        scale: float,
        mirror: Mirror | None = None,
    ) -> None:
        """With a `mirror` of the rows' sequences pages are gathered only where it lacks them."""
        self._kv = kv
        self._batch = batch
        self._scale = scale
        self._mirror = mirror
        self._device = batch.block_tables.device
        self._starts = [batch.starts[row] for row in rows]
        self._length = max(self._starts) + 1
        #: int64 `[n]`: the group's rows; None means every decode row, in order.
        self.rows: torch.Tensor | None = None
        if len(rows) < batch.decode_rows:
            self.rows = torch.tensor(rows, device=self._device)
        self._mask = self._padding()

    def __call__(
        self, layer: int, q: torch.Tensor, new: torch.Tensor, buffer: torch.Tensor
    ) -> torch.Tensor:
        """Attend with the group's queries `[n, heads, head_dim]`, whose keys and values `new`
        `[parts, n, kv_heads, head_dim]` are in their pages; gives `[n, heads * head_dim]`. `buffer`
        takes `buffered` elements."""
        if self._mirror is None:
            pages = self._gather(layer, buffer)
        else:
            pages = self._kept(self._mirror, layer, new)
        k, v = pages[0, :, :, : self._length], pages[-1, :, :, : self._length]
        # The query heads that share a KV head stand as query tokens: nothing is repeated.
        grouped = q.view(len(self._starts), k.shape[1], -1, k.shape[3])
        out = F.scaled_dot_product_attention(grouped, k, v, self._mask, scale=self._scale)
        return out.reshape(len(self._starts), -1)

    def _kept(self, mirror: Mirror, layer: int, new: torch.Tensor) -> torch.Tensor:
        pages = mirror.extended(layer, self._starts, new, self._places)
        if pages is None:
            pages = mirror.gathered(layer, self._starts, self._gather)
        return pages

    @property
    def buffered(self) -> int:
        """Elements of the buffer that a call fills."""
        return 0 if self._mirror else self._gather.size

    def _padding(self) -> torch.Tensor | None:
        if min(self._starts) + 1 == self._length:
            return None
        past = torch.arange(self._length, device=self._device) > self._positions[:, None]
        mask = torch.zeros(past.shape, dtype=self._kv.dtype, device=self._device)
        return mask.masked_fill_(past, float("-inf"))[:, None, None]

    @cached_property
    def _positions(self) -> torch.Tensor:
        return torch.tensor(self._starts, device=self._device)

    @cached_property
    def _places(self) -> torch.Tensor:
        assert self._mirror is not None
        parts, _, kv_heads = self._kv.storage.shape[1:4]
        return self._mirror.places(self._positions, parts, kv_heads)

    # A mirror that lacks nothing never asks for it.

    @cached_property
    def _gather(self) -> Gather:
        batch = self._batch
        size = batch.block_size
        blocks = -(-(self._mirror.capacity if self._mirror else self._length) // size)
        tables = batch.block_tables[: batch.decode_rows].long()
        if self.rows is not None:
            tables = tables.index_select(0, self.rows)
        # What pads a row must be finite, so it is the row's own first block.
        at = torch.arange(blocks, device=self._device)
        at = torch.where(at * size <= self._positions[:, None], at, 0)
        return Gather(self._kv, tables.gather(1, at))


def decode_groups(kv: KVCache, batch: AttentionBatch, scale: float) -> list[DecodeGroup]:
    """The decode rows of `batch`, cut where padding grows large; and, where nothing is kept between
    passes, where a gather does."""
    groups = _cut(batch, range(batch.decode_rows))
    mirrors: list[Mirror | None] = [None] * len(groups)
    if batch.sequences is not None and kv.format.exact:
        mirrors = kv.mirrors.of(
            [tuple(batch.sequences[row] for row in rows) for rows in groups],
            [max(batch.starts[row] for row in rows) + 1 for rows in groups],
            batch.block_size,
        )
    parts, _, kv_heads, _, head_dim = kv.storage.shape[1:]
    most = _GATHER_BYTES // (parts * kv_heads * head_dim * kv.dtype.itemsize)
    made = []
    for rows, mirror in zip(groups, mirrors, strict=True):
        cut = [rows] if mirror is not None else _cut(batch, rows, most)
        made += [DecodeGroup(kv, batch, its, scale, mirror) for its in cut]
    return made


def _cut(batch: AttentionBatch, rows: Sequence[int], most: float = math.inf) -> list[list[int]]:
    """`rows` in groups of like length, of `most` tokens with their padding; in order if all are one
    group, else longest first."""
    groups: list[list[int]] = []
    tokens = longest = 0
    for row in sorted(rows, key=batch.starts.__getitem__, reverse=True):
        length = batch.starts[row] + 1
        if groups:
            padded = longest * (len(groups[-1]) + 1)
            padding = padded - tokens - length
            roomy = padding <= max(_PADDED_TOKENS, _PADDING * tokens)
            if roomy and padded <= most:
                groups[-1].append(row)
                tokens += length
                continue
        groups.append([row])
        tokens = longest = length
    return groups if len(groups) > 1 else [sorted(group) for group in groups]
