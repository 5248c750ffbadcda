"""The contiguous copies of a batch's rows."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from asyncinfer.attention.batch import AttentionBatch
from asyncinfer.attention.contiguous import ContiguousKV
from asyncinfer.attention.gather import Gather
from asyncinfer.attention.kv import KVCache

__all__ = ["begin_copy", "find_copies"]


def find_copies(
    kv: KVCache, batch: AttentionBatch, groups: Sequence[list[int]], chunks: Sequence[int]
) -> list[ContiguousKV | None]:
    """The contiguous copy of each of the `groups` of rows, then of each row in `chunks`, which has
    a part of a prompt; None without one. All other copies are dropped."""
    rows = [*groups, *([row] for row in chunks)]
    if batch.sequences is None or not kv.format.exact:
        return [None] * len(rows)
    return kv.contiguous.of(
        [tuple(batch.sequences[row] for row in group) for group in rows],
        [max(batch.starts[row] + batch.counts[row] for row in group) for group in rows],
        batch.block_size,
        growing=len(chunks),
    )


def begin_copy(
    kv: KVCache, sequence: int, table: torch.Tensor, start: int, end: int
) -> ContiguousKV | None:
    """A contiguous copy of a sequence's first `start` tokens in all layers, with room for `end` of
    them; None without memory. All other copies are dropped. `table` int32 `[n]`: its blocks."""
    copy = kv.contiguous.begun((sequence,), end, kv.block_size)
    if copy is None:
        return None
    at = torch.arange(copy.capacity // kv.block_size)
    # Padding must be finite, as in `RowsKV`.
    blocks = table.long()[torch.where(at * kv.block_size < start, at, 0)]
    gather = Gather(kv, blocks[None])
    for layer in sorted(kv.layers):
        if start:
            copy.gathered(layer, [start], gather.shape, gather)
        else:
            copy.begin(layer, gather.shape)
    return copy
