"""`AttentionBatch`: which query tokens of a step belong to which sequence, and where KV lies."""

from __future__ import annotations

from dataclasses import dataclass

import torch

__all__ = ["AttentionBatch"]


@dataclass(slots=True)
class AttentionBatch:
    """The rows of one forward pass. Query tokens lie row after row in one flat dimension.

    Row `r` holds `counts[r]` query tokens at positions `starts[r] .. starts[r] + counts[r] - 1`
    of a sequence whose first `starts[r]` tokens are in the cache already. Rows of one token
    (decode) come first; `decode_rows` says how many. Tensors are on the model's device; the lists
    are the same facts for the host, so that nothing waits for the device to learn a shape.
    """

    #: int32 `[rows, max_blocks]`; entries past a row's last used block are never read.
    block_tables: torch.Tensor
    #: int32 `[rows]`: tokens of the sequence after this step, `start + count`.
    seq_lens: torch.Tensor
    #: int32 `[rows + 1]`: row `r` owns query tokens `query_starts[r] .. query_starts[r + 1] - 1`.
    query_starts: torch.Tensor
    #: int64 `[tokens]`: `block * block_size + offset` of each query token's own KV.
    slot_mapping: torch.Tensor
    starts: list[int]
    counts: list[int]
    #: Tokens per KV block.
    block_size: int
    #: How many rows, from the first on, have one query token.
    decode_rows: int

    @property
    def rows(self) -> int:
        return len(self.counts)
