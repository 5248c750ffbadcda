"""Chunked attention (Llama 4, 2025): positions are cut into chunks of one length, and a token
attends to the tokens before it in its own chunk.

That is causal attention over a sequence that begins with the chunk. So rows are cut where a chunk
begins, and any attention backend can compute them.
"""

from __future__ import annotations

from dataclasses import replace
from itertools import accumulate

import torch

from asyncinfer.attention.batch import AttentionBatch, DeviceBatch

__all__ = ["in_chunks"]


def in_chunks(batch: DeviceBatch, chunk: int, *, alone: bool) -> DeviceBatch:
    """`batch` with its rows cut at chunks. Query tokens stay where they are.

    Args:
        chunk: tokens of a chunk, a multiple of `block_size`.
        alone: whether all layers of the cache are chunked. Only then attention keeps copies of
            decode rows between passes, which are those of chunks.
    """
    if isinstance(batch, AttentionBatch):
        return _cut(batch, chunk, alone)
    size = batch.block_size
    begin = (batch.seq_lens - 1).clamp(min=0) // chunk * chunk
    return replace(
        batch,
        block_tables=_tables(batch.block_tables, begin // size, chunk // size),
        # A padding row has length 0, and begins at 0.
        seq_lens=batch.seq_lens - begin,
    )


def _cut(batch: AttentionBatch, chunk: int, alone: bool) -> AttentionBatch:
    size, device = batch.block_size, batch.block_tables.device
    rows: list[int] = []
    begins: list[int] = []
    starts: list[int] = []
    counts: list[int] = []
    for row, (start, count) in enumerate(zip(batch.starts, batch.counts, strict=True)):
        position, end = start, start + count
        while position < end:
            begin = position // chunk * chunk
            last = min(end, begin + chunk)
            rows.append(row)
            begins.append(begin)
            starts.append(position - begin)
            counts.append(last - position)
            position = last
    row_index, begin_index, lengths = torch.tensor(
        [rows, begins, [start + n for start, n in zip(starts, counts, strict=True)]], device=device
    )
    tables = batch.block_tables.index_select(0, row_index)
    sequences = None
    if alone and batch.sequences is not None:
        sequences = [
            batch.sequences[row] << 32 | begin // chunk
            for row, begin in zip(rows, begins, strict=True)
        ]
    return replace(
        batch,
        block_tables=_tables(tables, begin_index // size, chunk // size),
        seq_lens=lengths.to(batch.seq_lens.dtype),
        query_starts=torch.tensor(
            list(accumulate(counts, initial=0)), dtype=batch.query_starts.dtype, device=device
        ),
        starts=starts,
        counts=counts,
        sequences=sequences,
        # A chunk's copy grows with what is computed of it.
        prompt_lens=None,
    )


def _tables(tables: torch.Tensor, firsts: torch.Tensor, width: int) -> torch.Tensor:
    """At most `width` blocks of each row of `tables`, from the block at `firsts` `[rows]` on."""
    last = tables.shape[1] - 1
    at = firsts.long()[:, None] + torch.arange(min(width, last + 1), device=tables.device)
    # Repeated entries lie behind the row's last block, where nothing is read.
    return tables.gather(1, at.clamp(max=last))
