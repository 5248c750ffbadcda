"""`StateCache`: the paged states of layers that keep one of a fixed size in place of KV.

The page of a block holds the state after the last of the block's tokens that was computed. A row
goes on from the page of the token before it, and leaves a state on the page of every block that it
computes a token of. So the page of a full block is what a prefix hit after that block needs.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Self

import numpy as np
import numpy.typing as npt
import torch

__all__ = ["StateCache", "StatePass", "StateRows", "StateShape"]


@dataclass(frozen=True, slots=True)
class StateShape:
    """One tensor of a layer's state."""

    shape: tuple[int, ...]
    #: None: the model's.
    dtype: torch.dtype | None = None

    def bytes(self, dtype: torch.dtype) -> int:
        """Bytes of it in a model of `dtype`."""
        return math.prod(self.shape) * (self.dtype or dtype).itemsize


@dataclass(slots=True)
class StateRows:
    """Where the rows of one pass find their states and leave them. Row `r` computes `counts[r]`
    tokens from position `starts[r]` on; query tokens lie row after row."""

    starts: list[int]
    counts: list[int]
    #: int64 `[rows]`: the page of the state before each row; -1: it starts from nothing.
    before: torch.Tensor
    #: int64 `[tokens]`: the row of each query token.
    rows: torch.Tensor
    #: int64 `[marks]`: the query tokens after which states are kept, row after row, and their
    #: pages; -1: kept aside only.
    marks: torch.Tensor
    pages: torch.Tensor
    #: For each row with a draft: its slot, the tokens of the sequence at its first state that is
    #: kept aside, and which of the marks these are.
    aside: list[tuple[int, int, list[int]]]

    @classmethod
    def of(
        cls,
        starts: Sequence[int],
        counts: Sequence[int],
        tables: npt.NDArray[np.int32],
        block_size: int,
        drafted: Mapping[int, tuple[int, int]] | None = None,
    ) -> Self:
        """
        Args:
            tables: the rows' block tables in the state group, `[rows, blocks]`.
            drafted: row -> its slot, and how many of its last tokens are a draft.
        """
        first, count = np.array(starts, np.int64), np.array(counts, np.int64)
        every = np.arange(len(first))
        before = tables[every, np.maximum(first - 1, 0) // block_size].astype(np.int64)
        before[first == 0] = -1
        aside: list[tuple[int, int, list[int]]] = []
        if not drafted and count.max() == 1:
            rows, marks, pages = every, every, tables[every, first // block_size]
        else:
            rows = np.repeat(every, count)
            kept: list[int] = []
            where: list[int] = []
            begin = 0
            for row, (start, tokens) in enumerate(zip(starts, counts, strict=True)):
                end, slot, draft = start + tokens, -1, 0
                if drafted and row in drafted:
                    slot, draft = drafted[row]
                # Positions after a token, as numbers of tokens of the sequence.
                full = range(start // block_size * block_size + block_size, end, block_size)
                after = sorted({*full, *range(end - draft, end + 1)})
                if draft:
                    places = [len(kept) + after.index(end - draft + j) for j in range(draft + 1)]
                    aside.append((slot, end - draft, places))
                for tokens_then in after:
                    kept.append(begin + tokens_then - start - 1)
                    stays = tokens_then == end or not tokens_then % block_size
                    where.append(tables[row, (tokens_then - 1) // block_size] if stays else -1)
                begin += tokens
            marks, pages = np.array(kept, np.int64), np.array(where, np.int64)
        return cls(
            starts=list(starts),
            counts=list(counts),
            before=torch.from_numpy(before),
            rows=torch.from_numpy(rows),
            marks=torch.from_numpy(marks),
            pages=torch.from_numpy(pages.astype(np.int64)),
            aside=aside,
        )


class StateCache:
    """The pages of one state group. `tensors[t]` is `[num_pages, layers, *shape]`: one tensor of
    the state for each of `layers`, the model's layers in the group in order."""

    def __init__(
        self,
        shapes: Sequence[StateShape],
        num_pages: int,
        block_size: int,
        dtype: torch.dtype,
        layers: Sequence[int],
    ) -> None:
        """`dtype` is the model's."""
        self.tensors = [
            torch.zeros((num_pages, len(layers), *each.shape), dtype=each.dtype or dtype)
            for each in shapes
        ]
        self.block_size = block_size
        self.layers = frozenset(layers)
        #: The model's layer -> its place in the tensors.
        self.place = {layer: place for place, layer in enumerate(layers)}
        #: Slot -> states after drafted tokens: how many tokens the sequence has at the first of
        #: them, and the states `[states, layers, *shape]`.
        self._aside: dict[int, tuple[int, list[torch.Tensor]]] = {}

    def copy_blocks(self, pairs: Sequence[tuple[int, int]]) -> None:
        """Copy whole pages, `(source, target)` each; all sources are read before a target is
        written."""
        if pairs:
            source, target = torch.tensor(pairs, dtype=torch.int64).unbind(1)
            for tensor in self.tensors:
                tensor.index_copy_(0, target, tensor.index_select(0, source))

    def put_aside(self, slot: int, tokens: int, states: list[torch.Tensor]) -> None:
        """Keep the states after the draft of the slot's sequence, of which the first is that after
        `tokens` tokens, until `drop_aside`."""
        self._aside[slot] = tokens, states

    def drop_aside(self, slot: int) -> None:
        """The slot's last draft is decided on."""
        self._aside.pop(slot, None)

    def rewind(self, slot: int, tokens: int, page: int) -> None:
        """Write to `page` the state that the slot's sequence had after `tokens` tokens, of which
        the last ones are from its draft."""
        first, states = self._aside[slot]
        for tensor, held in zip(self.tensors, states, strict=True):
            tensor[page] = held[tokens - first]


class StatePass:
    """The states of one forward pass. Nothing is written to the pages before `commit`, so that a
    pass that fails has changed nothing."""

    def __init__(self, cache: StateCache, rows: StateRows, slots: Sequence[int]) -> None:
        """`slots` are those of the rows."""
        self._cache = cache
        self._slots = slots
        self.rows = rows
        new = (rows.before < 0).nonzero().flatten()
        source = rows.before.clamp(min=0)
        self._before = [tensor.index_select(0, source) for tensor in cache.tensors]
        if len(new):
            # What a page without a state holds may be NaN.
            self._before = [states.index_fill_(0, new, 0) for states in self._before]
        self._after = [
            torch.empty((len(rows.marks), *tensor.shape[1:]), dtype=tensor.dtype)
            for tensor in cache.tensors
        ]

    def before(self, layer: int) -> list[torch.Tensor]:
        """The tensors of the layer's states before each row, `[rows, *shape]`, zero where a
        sequence begins. They must not be changed."""
        place = self._cache.place[layer]
        return [states[:, place] for states in self._before]

    def keep(self, layer: int, *states: torch.Tensor) -> None:
        """The tensors of the layer's states after each of `rows.marks`, `[marks, *shape]`."""
        place = self._cache.place[layer]
        for after, state in zip(self._after, states, strict=True):
            after[:, place] = state

    def commit(self) -> None:
        """Write the states to their pages, and keep those after drafted tokens aside."""
        rows, cache = self.rows, self._cache
        paged, pages = self._after, rows.pages
        if rows.aside:
            stays = (pages >= 0).nonzero().flatten()
            paged = [after.index_select(0, stays) for after in paged]
            pages = pages.index_select(0, stays)
        for tensor, after in zip(cache.tensors, paged, strict=True):
            tensor.index_copy_(0, pages, after)
        for slot in self._slots:
            cache.drop_aside(slot)
        for slot, tokens, places in rows.aside:
            cache.put_aside(slot, tokens, [after[places] for after in self._after])
