"""`upload_pass`: from the arrays of a forward pass to what a decoder is given."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy.typing as npt
import torch

from asyncinfer.attention import AttentionBatch, KVCache
from asyncinfer.runner.input_batch import StepArrays
from asyncinfer.sampling import upload

__all__ = ["upload_pass"]


def upload_pass(
    device: torch.device,
    arrays: StepArrays,
    paged: Sequence[tuple[int, KVCache]],
    *more: npt.NDArray[Any],
) -> tuple[torch.Tensor, list[AttentionBatch], list[torch.Tensor]]:
    """The positions of the pass' tokens, int64 `[tokens]`; the rows as attention over each of
    `paged` sees them, caches with the number of their group; and `more` arrays, in the same copy to
    the device."""
    positions, slot_mapping, block_tables, seq_lens, query_starts, *others = upload(
        device,
        arrays.positions,
        arrays.slot_mapping,
        arrays.block_tables,
        arrays.seq_lens,
        arrays.query_starts,
        *more,
    )
    batches = [
        AttentionBatch(
            block_tables=block_tables[number],
            seq_lens=seq_lens,
            query_starts=query_starts,
            slot_mapping=slot_mapping[number],
            starts=arrays.starts,
            counts=arrays.counts,
            block_size=kv.block_size,
            decode_rows=arrays.decode_rows,
            sequences=arrays.sequences,
        )
        for number, kv in paged
    ]
    return positions, batches, others
