"""Attention of rows with few query tokens on a CPU, which reads their pages in place."""

from __future__ import annotations

from itertools import accumulate
from typing import Final

import torch

from asyncinfer.attention.batch import AttentionBatch
from asyncinfer.attention.contiguous import ContiguousKV
from asyncinfer.attention.kv import KVCache
from asyncinfer.attention.prefill import native_prefill
from asyncinfer.attention.variant import AttentionVariant
from asyncinfer.kernels.dispatch import CannotRecord
from asyncinfer.kernels.native import decode_kernel, empty, kv_write

__all__ = [
    "FixedChunk",
    "FixedRows",
    "NativeRows",
    "compile_native",
    "native_rows",
    "reads_plain_pages",
]

#: The most query tokens of a row, each of which reads the row's pages by itself.
_MOST_QUERIES = 4


class NativeRows:
    """Rows of a pass that native code computes, each query token as a row of its own."""

    def __init__(self, kv: KVCache, batch: AttentionBatch, scale: float, rows: list[int]) -> None:
        self._kv = kv
        self._scale = scale
        self.rows: Final = rows
        self._longest = max(batch.starts[row] + batch.counts[row] for row in rows)
        self._tables, self._lengths = batch.block_tables, batch.seq_lens
        #: int64 `[n]`: the query tokens; None: all of the pass, in order.
        self.tokens: torch.Tensor | None = None
        if len(rows) < len(batch.counts) or batch.decode_rows < len(rows):
            firsts = list(accumulate(batch.counts, initial=0))
            each = [(row, token) for row in rows for token in range(batch.counts[row])]
            numbers = torch.tensor([row for row, _ in each])
            self._tables = batch.block_tables.index_select(0, numbers)
            lengths = [batch.starts[row] + token + 1 for row, token in each]
            self._lengths = torch.tensor(lengths, dtype=torch.int32)
            if len(rows) < len(batch.counts):
                self.tokens = torch.tensor([firsts[row] + token for row, token in each])

    def write(
        self, layer: int, k: torch.Tensor, v: torch.Tensor, slots: tuple[torch.Tensor, torch.Tensor]
    ) -> bool:
        """Put keys and values `[tokens, kv_heads, head_dim]` of all tokens into their pages, where
        `slots` say for each head; False where torch is to do it."""
        (pages,), (first, second) = self._kv.pages[layer], slots
        return kv_write(pages, k, first) and kv_write(pages, v, second)

    def __call__(self, layer: int, q: torch.Tensor) -> torch.Tensor | None:
        """Attend with `q` `[tokens, heads, head_dim]` of all tokens of the pass, whose keys and
        values are in their pages; gives `[n, heads * head_dim]` for `tokens`. None: there is no
        code for so many heads."""
        if self.tokens is not None:
            q = q.index_select(0, self.tokens)
        kv, heads = self._kv, q.shape[1]
        kernel = decode_kernel(kv.dtype, kv.head_dim, heads // kv.storage.shape[3], self._scale)
        if kernel is None:
            return None
        return kernel(q, kv.k[layer], kv.v[layer], self._tables, self._lengths, self._longest)


class FixedChunk:
    """A chunk of a prompt, whose tokens go to a contiguous copy at places that stay at their
    address, and attend to that copy."""

    def __init__(
        self,
        kv: KVCache,
        scale: float,
        copy: ContiguousKV,
        start: int,
        places: torch.Tensor,
        order: torch.Tensor,
    ) -> None:
        """`start`: the position of the chunk's first token; `places`: int64 `[tokens * kv_heads]`,
        where each token's heads go in a layer's keys, and in its values, seen as `[any, head_dim]`,
        see `kv_write`; `order`: int64 `0 .. heads of the rows before the chunk`."""
        self.order: Final = order
        self._kv = kv
        self._scale = scale
        self._copy = copy
        self._start = start
        self._places = places

    def __call__(
        self, layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, out: torch.Tensor
    ) -> None:
        """Fill `out` `[tokens, heads * head_dim]`; the others are of the chunk's tokens, as an
        `Attend` takes them. Raises `CannotRecord` where there is no native code."""
        kv_heads = k.shape[1]
        kernel = native_prefill(q.device, q.dtype, q.shape[2], q.shape[1] // kv_heads, self._scale)
        keys, values = (part[0] for part in self._copy.layer(layer))
        pairs = (k, keys), (v, values)
        written = all(kv_write(part, new, self._places) for new, part in pairs)
        if kernel is None or not written:
            raise CannotRecord(f"a chunk's attention in layer {layer}")
        end = self._start + len(q)
        kernel(q, keys[:, :end], values[:, :end], self._start, out.view(q.shape))


class FixedRows:
    """Decode rows, of one query token each, whose tables, lengths and slots stay at their
    addresses, so that the native calls can be recorded. A chunk of a prompt may follow them."""

    def __init__(
        self,
        kv: KVCache,
        scale: float,
        tables: torch.Tensor,
        lengths: torch.Tensor,
        slots: tuple[torch.Tensor, torch.Tensor],
        longest: int,
        chunk: FixedChunk | None = None,
    ) -> None:
        """`tables` int32 `[rows, blocks]`; `lengths` int32 `[rows]`, at most `longest`; `slots`:
        int64 `[tokens * kv_heads]` for keys and for values, see `kv_write`. `chunk` takes the
        tokens after the rows'."""
        self._kv = kv
        self._scale = scale
        self._tables = tables
        self._lengths = lengths
        self._slots = slots
        self._longest = longest
        self._chunk = chunk

    def __call__(
        self,
        layer: int,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        variant: AttentionVariant | None = None,
    ) -> torch.Tensor:
        """See `Attend`. Raises `CannotRecord` where there is no native code for the layer."""
        (pages,) = self._kv.pages[layer]
        pairs = zip((k, v), self._slots, strict=True)
        if variant is not None or not all(kv_write(pages, new, slots) for new, slots in pairs):
            raise CannotRecord(f"attention of layer {layer}")
        if self._chunk is None:
            return self._attend(layer, q)
        rows, heads, head_dim = len(self._lengths), *q.shape[1:]
        out = empty(len(q), heads * head_dim, dtype=q.dtype)
        if rows:
            attended = self._attend(layer, q[:rows]).view(rows, heads, head_dim)
            if not kv_write(out, attended, self._chunk.order):
                raise CannotRecord(f"results of rows in layer {layer}")
        self._chunk(layer, q[rows:], k[rows:], v[rows:], out[rows:])
        return out

    def _attend(self, layer: int, q: torch.Tensor) -> torch.Tensor:
        kv = self._kv
        group = q.shape[1] // kv.storage.shape[3]
        kernel = decode_kernel(kv.dtype, kv.head_dim, group, self._scale)
        if kernel is None:
            raise CannotRecord(f"attention of layer {layer}")
        return kernel(q, kv.k[layer], kv.v[layer], self._tables, self._lengths, self._longest)


def compile_native(kv: KVCache, heads: int, scale: float) -> None:
    """Compile the code for so many query heads now, which takes some hundredths of a second."""
    group = heads // kv.storage.shape[3]
    if reads_plain_pages(kv):
        decode_kernel(kv.dtype, kv.head_dim, group, scale)
    native_prefill(kv.storage.device, kv.dtype, kv.head_dim, group, scale)


def native_rows(kv: KVCache, batch: AttentionBatch, scale: float) -> NativeRows | None:
    """The rows that native code may compute; None where there are none."""
    if not reads_plain_pages(kv):
        return None
    counts = zip(batch.starts, batch.counts, strict=True)
    rows = [
        row
        for row, (start, count) in enumerate(counts)
        if count == 1 or (start and count <= _MOST_QUERIES)
    ]
    return NativeRows(kv, batch, scale, rows) if rows else None


def reads_plain_pages(kv: KVCache) -> bool:
    """Whether the pages hold plain keys and values on a CPU."""
    return kv.storage.device.type == "cpu" and kv.format.exact and kv.storage.shape[1] == 2
