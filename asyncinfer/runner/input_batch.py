"""`InputBatch`: from a step to the arrays that the model and the sampler are given."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from asyncinfer.attention import AttentionBatch, KVCache
from asyncinfer.sampling import upload
from asyncinfer.scheduler import Join, PageChanges, RunnerSpec, Step

__all__ = ["InputBatch", "StepArrays", "integers", "spread"]

I32 = npt.NDArray[np.int32]
I64 = npt.NDArray[np.int64]


@dataclass(slots=True)
class StepArrays:
    """The arrays of one step, on the host. Rows of one query token come first; draws are in the
    step's order of rows."""

    #: Slot and position of each query token, `[tokens]`.
    token_slots: I64
    positions: I64
    #: `[groups, tokens]`, `[groups, rows, blocks]`, `[rows]`, `[rows + 1]`: see `AttentionBatch`.
    slot_mapping: I64
    block_tables: I32
    seq_lens: I32
    query_starts: I32
    starts: list[int]
    counts: list[int]
    decode_rows: int
    #: First query token of each row of the step, `[rows]`.
    first_tokens: I64
    #: Per draw: its row of the step, its query token, the slot, and the position of the token
    #: that is drawn, `[draws]`.
    draw_rows: I64
    draw_tokens: I64
    draw_slots: I64
    draw_positions: I64
    #: Slot of each query token's adapter, -1 for none, `[tokens]`; None: no token has one.
    adapters: I64 | None = None
    #: A number for each row's sequence, see `AttentionBatch`.
    sequences: list[int] | None = None
    #: Tokens of each row's prompt.
    prompt_lens: list[int] | None = None
    #: Rows with a draft -> how many of the last query tokens it is.
    drafted: dict[int, int] = field(default_factory=dict)

    @property
    def slots(self) -> list[int]:
        """The slot of each row."""
        slots: list[int] = self.token_slots[self.query_starts[:-1]].tolist()
        return slots

    def upload(
        self,
        device: torch.device,
        paged: Sequence[tuple[int, KVCache]],
        *more: npt.NDArray[Any],
    ) -> tuple[torch.Tensor, list[AttentionBatch], list[torch.Tensor]]:
        """The decoder's inputs: the positions of the tokens, int64 `[tokens]`; the rows as
        attention over each of `paged` sees them, caches with their group's number; and `more`
        arrays, in the same copy to the device."""
        positions, slot_mapping, block_tables, seq_lens, query_starts, *others = upload(
            device,
            self.positions,
            self.slot_mapping,
            self.block_tables,
            self.seq_lens,
            self.query_starts,
            *more,
        )
        batches = [
            AttentionBatch(
                block_tables=block_tables[number],
                seq_lens=seq_lens,
                query_starts=query_starts,
                slot_mapping=slot_mapping[number],
                starts=self.starts,
                counts=self.counts,
                block_size=kv.block_size,
                decode_rows=self.decode_rows,
                sequences=self.sequences,
                prompt_lens=self.prompt_lens,
            )
            for number, kv in paged
        ]
        return positions, batches, others

    @classmethod
    def of_single_rows(cls, positions: I64, slot_mapping: I64, block_tables: I32) -> StepArrays:
        """Rows of one query token each, in slots of their own, that draw nothing. Of one group:
        `slot_mapping` `[tokens]`, `block_tables` `[rows, blocks]`."""
        rows = np.arange(len(positions))
        none = rows[:0]
        return cls(
            token_slots=rows,
            positions=positions,
            slot_mapping=slot_mapping[None],
            block_tables=block_tables[None],
            seq_lens=(positions + 1).astype(np.int32),
            query_starts=np.arange(len(positions) + 1, dtype=np.int32),
            starts=positions.tolist(),
            counts=[1] * len(positions),
            decode_rows=len(positions),
            first_tokens=rows,
            draw_rows=none,
            draw_tokens=none,
            draw_slots=none,
            draw_positions=none,
        )


class InputBatch:
    """Block tables of the slots, and the arithmetic of a step. No Python per row or token."""

    def __init__(self, spec: RunnerSpec, tables: I32 | None = None) -> None:
        """`tables` int32 `[slots, groups, blocks]`: where the block tables are kept, for a caller
        that reads them too; None makes an array."""
        self._block_size = spec.block_size
        if tables is None:
            shape = spec.max_slots, len(spec.groups), spec.table_width
            tables = np.zeros(shape, np.int32)
        #: The same by group.
        self._tables: I32 = tables.transpose(1, 0, 2)
        self.prompt_lens: I64 = np.zeros(spec.max_slots, np.int64)
        #: Tokens that the pages of each slot hold, in the first group; maintained if tokens are
        #: predicted.
        self.capacities: I64 = np.zeros(spec.max_slots, np.int64)
        self._max_context = spec.max_context
        self._predicts = bool(spec.predicts)
        self._sequences: I64 = np.zeros(spec.max_slots, np.int64)
        #: Slot of each slot's adapter, -1 for none.
        self.adapters: I64 = np.full(spec.max_slots, -1, np.int64)
        self._joined = 0

    def join(self, join: Join) -> None:
        """Take over the slot's tables, its adapter and the length of its prompt."""
        for table, pages in zip(self._tables[:, join.slot], join.tables, strict=True):
            table[: len(pages)] = np.maximum(pages, 0)
            table[len(pages) :] = 0
        self._hold(np.array([join.slot]), np.array([len(join.tables[0])]))
        self.prompt_lens[join.slot] = join.prompt_len
        self.adapters[join.slot] = join.adapter
        self._joined += 1
        self._sequences[join.slot] = self._joined

    def grow(self, groups: Sequence[PageChanges]) -> list[tuple[int, I64, I64]]:
        """Enter what the tables of each group have grown by. Returns group, slots and indices of
        the new entries, int64 `[entries]` each, for every group that grew."""
        grown = []
        for group, changes in enumerate(groups):
            if changes.grown:
                numbers = integers(list(chain.from_iterable(changes.grown)))
                slots, indices, pages = numbers.reshape(-1, 3).T
                self._tables[group, slots, indices] = pages
                if group == 0 and self._predicts:
                    # In order, so that the last page of a slot wins.
                    self._hold(slots, indices + 1)
                grown.append((group, slots, indices))
        return grown

    def _hold(self, slots: I64, pages: I64) -> None:
        self.capacities[slots] = np.minimum(pages * self._block_size, self._max_context)

    def page(self, group: int, slot: int, block: int) -> int:
        """The page of one block in a slot's table."""
        return int(self._tables[group, slot, block])

    def build(self, step: Step) -> StepArrays:
        """The arrays of a step of one row at least, whose joins and growth were applied."""
        slots, starts = integers(step.slots), integers(step.starts)
        counts, samples = integers(step.counts), integers(step.samples)
        single = counts == 1
        decode_rows = int(single.sum())
        in_order = bool(single[:decode_rows].all())
        order = np.arange(len(slots)) if in_order else np.argsort(~single, kind="stable")
        row_slots, row_starts, row_counts = slots[order], starts[order], counts[order]
        ends = row_starts + row_counts

        query_starts = np.zeros(len(slots) + 1, np.int64)
        np.cumsum(row_counts, out=query_starts[1:])
        if decode_rows == len(slots):
            token_slots, positions = row_slots, row_starts
        else:
            token_slots = np.repeat(row_slots, row_counts)
            positions = spread(row_starts, row_counts)
        size = self._block_size
        pages = self._tables[:, token_slots, positions // size].astype(np.int64, order="C")
        width = -(-int(ends.max()) // size)

        first_tokens = np.empty_like(slots)
        first_tokens[order] = query_starts[:-1]
        draw_rows = np.repeat(np.arange(len(slots)), samples)
        adapters = self.adapters[token_slots]
        back = spread(-samples, samples)  # -1 for a row's last draw, -2 for the one before it
        return StepArrays(
            token_slots=token_slots,
            positions=positions,
            slot_mapping=pages * size + positions % size,
            block_tables=np.ascontiguousarray(self._tables[:, row_slots, :width]),
            seq_lens=ends.astype(np.int32),
            query_starts=query_starts.astype(np.int32),
            starts=row_starts.tolist(),
            counts=row_counts.tolist(),
            decode_rows=decode_rows,
            first_tokens=first_tokens,
            draw_rows=draw_rows,
            draw_tokens=(first_tokens + counts)[draw_rows] + back,
            draw_slots=slots[draw_rows],
            draw_positions=(starts + counts)[draw_rows] + back + 1,
            sequences=self._sequences[row_slots].tolist(),
            prompt_lens=self.prompt_lens[row_slots].tolist(),
            adapters=adapters if adapters.max() >= 0 else None,
            drafted=_drafted(step.drafts, order) if step.drafts else {},
        )


def _drafted(drafts: Mapping[int, Sequence[int]], order: I64) -> dict[int, int]:
    """The length of each row's draft, by the row's place in `order`."""
    return {row: len(drafts[of]) for row, of in enumerate(order.tolist()) if of in drafts}


def integers(numbers: Sequence[int]) -> I64:
    """int64 `[len(numbers)]`. `np.array` takes half as long again, since it looks for a dtype."""
    return np.fromiter(numbers, np.int64, len(numbers))


def spread(firsts: I64, counts: I64) -> I64:
    """`firsts[r], firsts[r] + 1, ...`, `counts[r]` numbers for each `r`, one after the other."""
    ends = np.cumsum(counts)
    total = int(ends[-1])
    return np.arange(total) + np.repeat(firsts - ends + counts, counts)
