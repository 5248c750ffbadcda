"""The layout of a step: the sequence of each query token, and the place of its KV."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch

__all__ = ["AttentionBatch", "DeviceBatch"]


@dataclass(slots=True)
class DeviceBatch:
    """The rows of one forward pass in one KV group, as device tensors alone. A graph can record
    attention over it, since nothing is read on the host.

    Query tokens lie row after row in one flat dimension. Decode rows, of one token each, come
    first; `decode_rows` counts them.
    """

    #: int32 `[rows, max_blocks]`. Only the blocks that a row's query tokens see are read.
    block_tables: torch.Tensor
    #: int32 `[rows]`: tokens of the sequence after this step. 0 for a padding row, for which
    #: nothing is read or written.
    seq_lens: torch.Tensor
    #: int32 `[rows + 1]`: row `r` owns query tokens `query_starts[r] .. query_starts[r + 1] - 1`.
    query_starts: torch.Tensor
    #: int64 `[tokens]`: `block * block_size + offset` of each query token's own KV; -1: not stored.
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
    """A `DeviceBatch` whose lengths the host knows too, so that no shape waits for the device.

    Row `r` holds `counts[r]` query tokens at positions `starts[r] .. starts[r] + counts[r] - 1`
    of a sequence whose first `starts[r]` tokens are in the cache already.
    """

    starts: list[int]
    counts: list[int]
    #: Whether a token's result must be the same to the last bit in every batch.
    invariant: bool = False
    #: With `invariant`: keys of a decode row that one part of the split sums up.
    chunk: int = 256
    #: Identity of each row's sequence: a number stands for the same tokens before the row's start
    #: in every pass. None: nothing is kept between passes.
    sequences: list[int] | None = None
    #: Tokens of each row's prompt; None where that is not known.
    prompt_lens: list[int] | None = None
