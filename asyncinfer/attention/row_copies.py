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
        prompts=[0 if batch.prompt_lens is None else batch.prompt_lens[row] for row in chunks],
    )


def begin_copy(
    kv: KVCache, sequence: int, table: torch.Tensor, start: int, end: int, prompt_len: int
) -> ContiguousKV | None:
    """A contiguous copy of a sequence's first `start` tokens in all layers, with room for `end` of
    them and, where memory allows, for its prompt; None without memory. All other copies are
    dropped. `table` int32 `[n]`: its blocks."""
    copy = kv.contiguous.begun((sequence,), end, kv.block_size, prompt_len)
    if copy is None:
        return None
    blocks = table[: -(-start // kv.block_size)].long()
    gather = Gather(kv, blocks[None], copy.capacity)
    for layer in sorted(kv.layers):
        if start:
            copy.gathered(layer, [start], gather.shape, gather)
        else:
            copy.begin(layer, gather.shape)
    return copy
