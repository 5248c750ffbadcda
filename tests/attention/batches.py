"""Builds an `AttentionBatch` from lists."""

from __future__ import annotations

import random
from collections.abc import Sequence
from itertools import accumulate

import torch

from asyncinfer.attention import AttentionBatch

Row = tuple[int, int]


def scattered_tables(
    lengths: Sequence[int], num_blocks: int, block_size: int, seed: int = 0
) -> list[list[int]]:
    """A block table per row, its blocks all over the cache and in no order."""
    blocks = list(range(num_blocks))
    random.Random(seed).shuffle(blocks)
    return [[blocks.pop() for _ in range(-(-length // block_size))] for length in lengths]


def batch_of(
    rows: Sequence[Row], tables: Sequence[Sequence[int]], block_size: int
) -> tuple[torch.Tensor, AttentionBatch]:
    """Positions int64 `[tokens]` and the batch of `rows`, `(start, count)` each, one-token rows
    first. Block tables are padded with -1, which nothing may read."""
    counts = [count for _, count in rows]
    decode_rows = next((row for row, count in enumerate(counts) if count > 1), len(rows))
    places = [
        (table, position)
        for (start, count), table in zip(rows, tables, strict=True)
        for position in range(start, start + count)
    ]
    width = max(len(table) for table in tables) + 1
    padded = [[*table, *[-1] * (width - len(table))] for table in tables]
    return torch.tensor([position for _, position in places]), AttentionBatch(
        block_tables=torch.tensor(padded, dtype=torch.int32),
        seq_lens=torch.tensor([start + count for start, count in rows], dtype=torch.int32),
        query_starts=torch.tensor(list(accumulate(counts, initial=0)), dtype=torch.int32),
        slot_mapping=torch.tensor(
            [table[at // block_size] * block_size + at % block_size for table, at in places]
        ),
        starts=[start for start, _ in rows],
        counts=counts,
        block_size=block_size,
        decode_rows=decode_rows,
    )
