"""Which query tokens of a step belong to which sequence, and where their KV lies."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch

__all__ = ["AttentionBatch", "DeviceBatch"]


@dataclass(slots=True)
class DeviceBatch:
    """The rows of one forward pass in one KV group, as the device knows them: enough for attention
    that asks the host nothing, such as a recorded step's. Query tokens lie row after row in one
    flat dimension.

    Rows of one token (decode) come first; `decode_rows` says how many.
    """

    #: int32 `[rows, max_blocks]`; only the blocks are read that a row's query tokens see.
    block_tables: torch.Tensor
    #: int32 `[rows]`: tokens of the sequence after this step. 0 for a row that only fills up the
    #: batch: nothing is read or written for it.
    seq_lens: torch.Tensor
    #: int32 `[rows + 1]`: row `r` owns query tokens `query_starts[r] .. query_starts[r + 1] - 1`.
    query_starts: torch.Tensor
    #: int64 `[tokens]`: `block * block_size + offset` of each query token's own KV; -1 for nowhere.
    slot_mapping: torch.Tensor
    #: Tokens per KV block.
    block_size: int
    #: How many rows, from the first on, have one query token.
    decode_rows: int
    #: int32, all zero, one for each decode row and query head: see `AttentionWorkspace`. None:
    #: attention makes its own.
    arrivals: torch.Tensor | None = field(default=None, kw_only=True)


@dataclass(slots=True)
class AttentionBatch(DeviceBatch):
    """The same facts for the host too, so that nothing waits for the device to learn a shape.

    Row `r` holds `counts[r]` query tokens at positions `starts[r] .. starts[r] + counts[r] - 1`
    of a sequence whose first `starts[r]` tokens are in the cache already.
    """

    starts: list[int]
    counts: list[int]
    #: Whether a token's result must be the same to the last bit whatever else is in the batch.
    invariant: bool = False
    #: Then the keys of a decode row are shared out in parts of so many.
    chunk: int = 256
    #: Numbers the rows' sequences, alike in every pass: a number stands for the same tokens at the
    #: same positions for ever. None: nothing is kept between passes.
    sequences: list[int] | None = None

    @property
    def rows(self) -> int:
        return len(self.counts)
