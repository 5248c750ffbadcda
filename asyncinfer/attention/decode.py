"""Attention of rows with few query tokens, batched over rows of similar length."""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import cached_property
from itertools import accumulate
from typing import Final

import torch
import torch.nn.functional as F

from asyncinfer.attention.batch import AttentionBatch
from asyncinfer.attention.contiguous import ContiguousKV
from asyncinfer.attention.gather import Gather
from asyncinfer.attention.kv import KVCache
from asyncinfer.attention.products import attend_by_products, has_faster_product

__all__ = [
    "FEW",
    "FEW_BESIDE_CODE",
    "DecodeGroup",
    "RowsKV",
    "decode_groups",
    "few_rows",
    "group_rows",
]

#: Query tokens of a row that decodes, at most: the longest draft, and the token before it.
FEW: Final = 33
#: The same of a row that native code for chunks could compute, and the tokens below which a
#: sequence is short: with 16 rows of 5 such tokens a group took 0.7 of that code's time at 64
#: tokens, and 1.1 at 256.
FEW_BESIDE_CODE: Final = 4
_SHORT: Final = 128
#: Queries of padding for each row on average, at most. A row gathered anew, because it is not in
#: the group of the step before, costs about as many.
_PADDED_QUERIES = 8

#: A group is closed when its rows' padding passes this share of their tokens ...
_PADDING = 0.25
#: ... plus this many tokens: gathering them costs about as much as the calls of another group.
_PADDED_TOKENS = 128
#: With so many scores of a row and KV head, oneDNN's products take less time than torch's
#: attention; with fewer, their calls cost more than they save.
_MANY_SCORES = 1 << 16
#: Bytes of one gather: attention should still find it in the processor's cache.
_GATHER_BYTES = 4 << 20


class RowsKV:
    """The contiguous keys and values of some rows of a batch: gathered for each layer, or a copy
    that outlives the step, for which pages are gathered only when it lacks tokens."""

    def __init__(
        self,
        kv: KVCache,
        batch: AttentionBatch,
        rows: list[int],
        copy: ContiguousKV | None,
    ) -> None:
        self.cache: Final = kv
        self.batch: Final = batch
        self.rows: Final = rows
        self._copy = copy
        self.starts: Final = [batch.starts[row] for row in rows]
        self.counts: Final = [batch.counts[row] for row in rows]
        self.ends: Final = [start + n for start, n in zip(self.starts, self.counts, strict=True)]
        #: Query tokens of each row, padding included.
        self.queries: Final = max(self.counts)
        #: int64 `[rows, queries]`: those of the rows' query tokens.
        self.positions: Final = self.padded(self.starts)

    def __call__(self, layer: int, new: torch.Tensor, buffer: torch.Tensor) -> torch.Tensor:
        """`[parts, rows, kv_heads, tokens, head_dim]` of `layer`, keys first and values last, of at
        least as many tokens as the longest row has. Those of the rows' query tokens are `new`
        `[parts, rows * queries, kv_heads, head_dim]`, which are in their pages already. `buffer`
        takes `buffered` elements."""
        if self._copy is None:
            return self._gather(layer, buffer)
        pages = self._copy.extended(layer, self.starts, self.ends, new, self._places)
        if pages is None:
            pages = self._copy.gathered(layer, self.ends, self._gather.shape, self._gather)
        return pages

    @property
    def buffered(self) -> int:
        """Elements of the buffer that a call fills."""
        return 0 if self._copy else self._gather.size

    @cached_property
    def _places(self) -> torch.Tensor:
        assert self._copy is not None
        parts, _, kv_heads = self.cache.storage.shape[1:4]
        return self._copy.places(self.positions, parts, kv_heads)

    def padded(self, firsts: list[int]) -> torch.Tensor:
        """int64 `[rows, queries]`: each row's query tokens from its number in `firsts` on, the last
        one as often as padding needs."""
        first = torch.tensor(firsts, device=self.batch.block_tables.device)[:, None]
        if self.queries == 1:
            return first
        last = torch.tensor(self.counts, device=first.device)[:, None] - 1
        return first + torch.arange(self.queries, device=first.device).minimum(last)

    @cached_property
    def _gather(self) -> Gather:
        """Padding must be finite, so a row is padded with its own first block. A row by itself has
        none: nobody reads what is behind its tokens."""
        capacity = self._copy.capacity if self._copy else max(self.ends)
        tokens = capacity if len(self.rows) > 1 else self.ends[0]
        size, last = self.batch.block_size, self.positions[:, -1:]
        tables = self.batch.block_tables[self.rows].long()
        at = torch.arange(-(-tokens // size), device=tables.device)
        blocks = tables.gather(1, torch.where(at * size <= last, at, 0))
        return Gather(self.cache, blocks, capacity)


class DecodeGroup:
    """Rows of similar length with few query tokens each. They are padded to the longest row, and to
    the most query tokens by repeating a row's last one."""

    def __init__(self, kv: RowsKV, scale: float) -> None:
        self.kv: Final = kv
        self._scale = scale
        self._length = max(kv.ends)
        #: Query tokens of all rows, padding included.
        self.size: Final = len(kv.rows) * kv.queries
        #: The mask for `kv.queries` times the heads of a KV head.
        self._grouped_mask: torch.Tensor | None = None

    def __call__(
        self, layer: int, q: torch.Tensor, new: torch.Tensor, buffer: torch.Tensor
    ) -> torch.Tensor:
        """Attend with the queries of `tokens`, `q` `[tokens, heads, head_dim]`, whose keys and
        values `new` `[parts, tokens, kv_heads, head_dim]` are in their pages; gives
        `[tokens, heads * head_dim]`. `buffer` takes `kv.buffered` elements."""
        pages = self.kv(layer, new, buffer)
        k, v = pages[0, :, :, : self._length], pages[-1, :, :, : self._length]
        # Query heads that share a KV head are passed as query tokens, so that KV is not repeated.
        rows, kv_heads, _, head_dim = k.shape
        if self.kv.queries == 1:
            grouped = q.view(rows, kv_heads, -1, head_dim)
            out = F.scaled_dot_product_attention(grouped, k, v, self._mask, scale=self._scale)
            return out.reshape(rows, -1)
        apart = q.view(rows, self.kv.queries, kv_heads, -1, head_dim)
        scores = self.kv.queries * apart.shape[3] * self._length
        if scores >= _MANY_SCORES and q.device.type == "cpu" and has_faster_product(q.dtype):
            return self._by_products(apart, k, v).view(q.shape[0], -1)
        apart = apart.transpose(1, 2)
        mask = self._mask_of(apart.shape[3])
        grouped = apart.reshape(rows, kv_heads, -1, head_dim)
        out = F.scaled_dot_product_attention(grouped, k, v, mask, scale=self._scale)
        return out.view(apart.shape).transpose(1, 2).reshape(q.shape[0], -1)

    def _by_products(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        """Attention of `q` `[rows, queries, kv_heads, group, head_dim]`, one row at a time."""
        out = torch.empty_like(q)
        bounds = zip(self.kv.starts, self.kv.counts, strict=True)
        for row, (start, count) in enumerate(bounds):
            queries = q[row, :count].flatten(1, 2)
            attend_by_products(queries, k[row], v[row], start, self._scale, out[row, :count])
            # Padding repeats the row's last query.
            out[row, count:] = out[row, count - 1]
        return out

    @property
    def in_order(self) -> bool:
        """Whether the group's tokens are the first of the batch, row after row without padding."""
        return min(self.kv.counts) == self.kv.queries and self.kv.rows == list(
            range(len(self.kv.rows))
        )

    @cached_property
    def tokens(self) -> torch.Tensor | None:
        """int64 `[rows * queries]`: the batch's query tokens that the group takes, row after row,
        each row's last one as often as padding needs. None: the batch's first tokens, in order."""
        if self.in_order:
            return None
        firsts = list(accumulate(self.kv.batch.counts, initial=0))
        return self.kv.padded([firsts[row] for row in self.kv.rows]).flatten()

    @cached_property
    def _mask(self) -> torch.Tensor | None:
        """The mask added to scores, `[rows, 1, queries, keys]`; None: each query sees all keys."""
        if self.kv.queries == 1 and min(self.kv.ends) == self._length:
            return None
        positions = self.kv.positions[:, :, None]
        future = torch.arange(self._length, device=positions.device) > positions
        mask = torch.zeros(future.shape, dtype=self.kv.cache.dtype, device=positions.device)
        return mask.masked_fill_(future, float("-inf"))[:, None]

    def _mask_of(self, group: int) -> torch.Tensor:
        """The mask of queries that stand for `group` heads each."""
        if self._grouped_mask is None:
            assert self._mask is not None
            self._grouped_mask = self._mask.repeat_interleave(group, dim=2)
        return self._grouped_mask


def few_rows(batch: AttentionBatch, *, chunk_code: bool = False) -> list[int]:
    """The rows that decode: those of one query token, and those of few that go on with a sequence,
    as drafts and forced tokens do. `chunk_code`: native code attends with chunks of prompts, which
    is faster for more than `FEW_BESIDE_CODE` query tokens of all but short sequences, and for a
    single row, whose calls can be recorded."""
    longer = range(batch.decode_rows, len(batch.counts))

    def is_few(row: int) -> bool:
        group = not chunk_code or (len(longer) > 1 and _length(batch, row) < _SHORT)
        return batch.counts[row] <= (FEW if group else FEW_BESIDE_CODE)

    few = [row for row in longer if batch.starts[row] and is_few(row)]
    return [*range(batch.decode_rows), *few]


def group_rows(batch: AttentionBatch, rows: Sequence[int]) -> list[list[int]]:
    """These rows of `batch`, with few query tokens each, in groups whose padding stays small."""
    return [group for part in _by_queries(batch, rows) for group in _cut(batch, part)]


def decode_groups(
    kv: KVCache,
    batch: AttentionBatch,
    scale: float,
    groups: Sequence[list[int]],
    copies: Sequence[ContiguousKV | None],
) -> list[DecodeGroup]:
    """`groups` of rows with their copies. Groups without one are cut where gathers grow large."""
    parts, _, kv_heads = kv.storage.shape[1:4]
    most = _GATHER_BYTES // (parts * kv_heads * kv.head_dim * kv.dtype.itemsize)
    made = []
    for group, copy in zip(groups, copies, strict=True):
        cut = [group] if copy is not None else _cut(batch, group, most)
        made += [DecodeGroup(RowsKV(kv, batch, part, copy), scale) for part in cut]
    return made


def _by_queries(batch: AttentionBatch, rows: Sequence[int]) -> list[Sequence[int]]:
    """The rows together, so that a copy of them outlives a step in which other rows have drafts; in
    two parts where that would pad them with too many queries."""
    counts = [batch.counts[row] for row in rows]
    if len(rows) * (max(counts, default=0) - _PADDED_QUERIES) <= sum(counts):
        return [rows]
    short = [row for row in rows if batch.counts[row] <= _PADDED_QUERIES]
    return [short, [row for row in rows if batch.counts[row] > _PADDED_QUERIES]]


def _length(batch: AttentionBatch, row: int) -> int:
    return batch.starts[row] + batch.counts[row]


def _cut(batch: AttentionBatch, rows: Sequence[int], most: float = math.inf) -> list[list[int]]:
    """`rows` in groups of similar length, of at most `most` tokens with their padding. One group
    keeps the rows' order; several go from the longest row to the shortest."""
    groups: list[list[int]] = []
    tokens = longest = 0
    for row in sorted(rows, key=lambda row: _length(batch, row), reverse=True):
        length = _length(batch, row)
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
