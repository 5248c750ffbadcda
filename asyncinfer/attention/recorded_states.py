"""`RecordedStates`: the states of decode rows whose pages are known to the device alone, so that a
graph can record them."""

from __future__ import annotations

import torch

from asyncinfer.attention.states import StateCache
from asyncinfer.kernels.row_spans import RowSpans

__all__ = ["RecordedStates"]


class RecordedStates:
    """The states of one pass, with one query token for each row. As in `StatePass` nothing is
    written before `commit`.

    Args:
        tables: int32 `[rows, blocks]`: the rows' block tables in the state group.
        positions: int64 `[rows]`, of the query tokens.
        seq_lens: int32 `[rows]`: 0 for a row of padding, whose state lies on a page of no block.
    """

    def __init__(
        self,
        cache: StateCache,
        tables: torch.Tensor,
        positions: torch.Tensor,
        seq_lens: torch.Tensor,
    ) -> None:
        rows = len(positions)
        self.spans = RowSpans([1] * rows, range(rows), cache.device)
        self._cache = cache
        self._new = positions == 0
        padding = seq_lens == 0

        def pages(at: torch.Tensor) -> torch.Tensor:
            block = torch.div(at, cache.block_size, rounding_mode="floor")
            held = tables.gather(1, block[:, None])[:, 0].long()
            return held.masked_fill_(padding, cache.spare_page)

        self._before = pages((positions - 1).clamp_(min=0))
        self._pages = pages(positions)
        self._kept: list[tuple[int, tuple[torch.Tensor, ...]]] = []

    def before(self, layer: int) -> list[torch.Tensor]:
        """As of `StatePass`."""
        place = self._cache.place[layer]
        held = [tensor[:, place].index_select(0, self._before) for tensor in self._cache.tensors]
        return [each.masked_fill_(self._new.view(-1, *[1] * (each.ndim - 1)), 0) for each in held]

    def keep(self, layer: int, *states: torch.Tensor) -> None:
        """The tensors of the layer's states after each row."""
        self._kept.append((self._cache.place[layer], states))

    def commit(self) -> None:
        """Write the states to their pages."""
        for place, states in self._kept:
            for tensor, state in zip(self._cache.tensors, states, strict=True):
                tensor[:, place].index_copy_(0, self._pages, state)
