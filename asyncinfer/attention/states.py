"""`StateCache`: the paged states of layers that keep one of a fixed size in place of KV.

The page of a block holds the state after the last of the block's tokens that was computed. A row
goes on from the page of the token before it, and leaves a state on the page of every block that it
computes a token of. So the page of a full block is what a prefix hit after that block needs.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol, Self

import numpy as np
import numpy.typing as npt
import torch

from asyncinfer.kernels.row_spans import RowSpans

__all__ = ["LayerStates", "StateCache", "StatePass", "StateRows", "StateShape"]


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
    tokens from position `starts[r]` on; query tokens lie row after row. Tensors are int64, on the
    cache's device."""

    starts: list[int]
    counts: list[int]
    #: The rows, and as marks the query tokens after which states are kept.
    spans: RowSpans
    #: `[rows]`: the page of the state before each row; any, if it starts from nothing.
    before: torch.Tensor
    #: `[new]`: the rows that start from nothing.
    new: torch.Tensor
    #: `[early]`: marks whose states are written at once, and their pages, which no row of the pass
    #: reads.
    early: torch.Tensor
    early_pages: torch.Tensor
    #: `[held]`: the other marks, whose states are held until the pass is over.
    held: torch.Tensor
    #: `[paged]`: the pages of held states; and which of these they are, None: all, in order. Other
    #: states are kept aside only.
    pages: torch.Tensor
    paged: torch.Tensor | None
    #: For each row with a draft: its slot, the tokens of the sequence at its first state that is
    #: kept aside, and which of the held states these are.
    aside: list[tuple[int, int, list[int]]]

    @classmethod
    def of(
        cls,
        starts: Sequence[int],
        counts: Sequence[int],
        tables: npt.NDArray[np.int32],
        block_size: int,
        drafted: Mapping[int, tuple[int, int]] | None = None,
        device: torch.device | str = "cpu",
    ) -> Self:
        """
        Args:
            tables: the rows' block tables in the state group, `[rows, blocks]`.
            drafted: row -> its slot, and how many of its last tokens are a draft.
        """
        first = np.array(starts, np.int64)
        every = np.arange(len(first))
        before = tables[every, np.maximum(first - 1, 0) // block_size].astype(np.int64)
        new = np.flatnonzero(first == 0)
        before[new] = 0
        aside: list[tuple[int, int, list[int]]] = []
        kept: list[int] = []
        where: list[int] = []
        begin = 0
        single = not drafted and max(counts) == 1
        if single:
            kept, where = every.tolist(), tables[every, first // block_size].tolist()
        for row, (start, tokens) in enumerate(() if single else zip(starts, counts, strict=True)):
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
                where.append(int(tables[row, (tokens_then - 1) // block_size]) if stays else -1)
            begin += tokens
        every_page = np.array(where, np.int64)
        late = (every_page < 0) | np.isin(every_page, before[first > 0])
        for _, _, places in aside:
            late[places] = True
        numbers = np.cumsum(late) - 1
        aside = [(slot, at, numbers[places].tolist()) for slot, at, places in aside]
        pages = every_page[late]
        paged = np.flatnonzero(pages >= 0)

        def on_device(values: npt.NDArray[np.int64]) -> torch.Tensor:
            return torch.from_numpy(values).to(device)

        return cls(
            starts=list(starts),
            counts=list(counts),
            spans=RowSpans(counts, kept, device),
            before=on_device(before),
            new=on_device(new),
            early=on_device(np.flatnonzero(~late)),
            early_pages=on_device(every_page[~late]),
            held=on_device(np.flatnonzero(late)),
            pages=on_device(pages[paged]),
            paged=None if len(paged) == len(pages) else on_device(paged),
            aside=aside,
        )


class StateCache:
    """The pages of one state group, and a spare one. `tensors[t]` is `[pages, layers, *shape]`: one
    tensor of the state for each of `layers`, the model's layers in the group in order."""

    def __init__(
        self,
        shapes: Sequence[StateShape],
        num_pages: int,
        block_size: int,
        dtype: torch.dtype,
        layers: Sequence[int],
        device: torch.device | str = "cpu",
    ) -> None:
        """`dtype` is the model's."""
        self.device = torch.device(device)
        #: The page of no block, for rows of padding.
        self.spare_page = num_pages
        self.tensors = [
            torch.zeros(
                (num_pages + 1, len(layers), *each.shape), dtype=each.dtype or dtype, device=device
            )
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
            source, target = torch.tensor(pairs, dtype=torch.int64, device=self.device).unbind(1)
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


class LayerStates(Protocol):
    """The states of one pass, as layers see them."""

    @property
    def spans(self) -> RowSpans:
        """The rows, and as marks the tokens after which states are kept."""

    def before(self, layer: int) -> list[torch.Tensor]:
        """The tensors of the layer's states before each row, `[rows, *shape]`, zero where a
        sequence begins. They must not be changed."""

    def keep(self, layer: int, *states: torch.Tensor) -> None:
        """The tensors of the layer's states after each mark, `[marks, *shape]`."""


class StatePass:
    """The states of one forward pass. Nothing is written before `commit` to the pages from which
    its rows go on, so that a pass that fails can be computed again."""

    def __init__(self, cache: StateCache, rows: StateRows, slots: Sequence[int]) -> None:
        """`slots` are those of the rows."""
        self._cache = cache
        self._slots = slots
        self.rows = rows
        self.spans = rows.spans
        self._held = [
            tensor.new_empty((len(rows.held), *tensor.shape[1:])) for tensor in cache.tensors
        ]

    def before(self, layer: int) -> list[torch.Tensor]:
        """See `LayerStates`."""
        place, rows = self._cache.place[layer], self.rows
        found = [tensor[:, place].index_select(0, rows.before) for tensor in self._cache.tensors]
        if len(rows.new):
            # What a page without a state holds may be NaN.
            found = [states.index_fill_(0, rows.new, 0) for states in found]
        return found

    def keep(self, layer: int, *states: torch.Tensor) -> None:
        """See `LayerStates`."""
        place, rows = self._cache.place[layer], self.rows
        for tensor, held, state in zip(self._cache.tensors, self._held, states, strict=True):
            if not len(rows.early):
                held[:, place] = state
                continue
            held[:, place] = state.index_select(0, rows.held)
            early = state.index_select(0, rows.early).to(tensor.dtype)
            tensor[:, place].index_copy_(0, rows.early_pages, early)

    def commit(self) -> None:
        """Write the states to their pages, and keep those after drafted tokens aside."""
        rows, cache = self.rows, self._cache
        paged = self._held
        if rows.paged is not None:
            paged = [held.index_select(0, rows.paged) for held in paged]
        for tensor, states in zip(cache.tensors, paged, strict=True):
            tensor.index_copy_(0, rows.pages, states)
        for slot in self._slots:
            cache.drop_aside(slot)
        for slot, tokens, places in rows.aside:
            cache.put_aside(slot, tokens, _picked(self._held, places))


def _picked(states: Sequence[torch.Tensor], places: Sequence[int]) -> list[torch.Tensor]:
    """Those of the held states. A draft's follow each other, so that they need no index on the
    device."""
    first, last = places[0], places[-1]
    assert last - first == len(places) - 1
    return [each[first : last + 1].clone() for each in states]
