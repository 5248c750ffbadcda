"""`InputBatch`: from a step's plan to the arrays that the model and the sampler are given."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from asyncinfer.scheduler import Join, PageChanges, RunnerSpec, Step

__all__ = ["InputBatch", "StepArrays"]

I32 = npt.NDArray[np.int32]
I64 = npt.NDArray[np.int64]


@dataclass(slots=True)
class StepArrays:
    """One step, on the host. Rows of one query token come first; draws are in the plan's order."""

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
    #: First query token of each row of the plan, `[rows]`.
    first_tokens: I64
    #: Per draw: its row of the plan, its query token, the slot, and the position of the token
    #: that is drawn, `[draws]`.
    draw_rows: I64
    draw_tokens: I64
    draw_slots: I64
    draw_positions: I64
    #: Whether the token drawn comes after all that the row's slot knew, `[draws]`.
    draw_last: npt.NDArray[np.bool_]
    #: A number for each row's sequence, see `AttentionBatch`.
    sequences: list[int] | None = None

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
            draw_last=none.astype(np.bool_),
        )


class InputBatch:
    """Block tables of the slots, and the arithmetic of a step. No Python per row or token."""

    def __init__(self, spec: RunnerSpec, tables: I32 | None = None) -> None:
        """`tables` int32 `[slots, groups, blocks]` is where the block tables are kept, if somebody
        else wants to see them too."""
        self._block_size = spec.block_size
        if tables is None:
            shape = spec.max_slots, len(spec.groups), spec.table_width
            tables = np.zeros(shape, np.int32)
        #: The same by group.
        self._tables: I32 = tables.transpose(1, 0, 2)
        self.prompt_lens: I64 = np.zeros(spec.max_slots, np.int64)
        self._sequences: I64 = np.zeros(spec.max_slots, np.int64)
        self._joined = 0

    def join(self, join: Join) -> None:
        """The slot's tables are now `join.tables`."""
        for table, pages in zip(self._tables[:, join.slot], join.tables, strict=True):
            table[: len(pages)] = np.maximum(pages, 0)
            table[len(pages) :] = 0
        self.prompt_lens[join.slot] = join.prompt_len
        self._joined += 1
        self._sequences[join.slot] = self._joined

    def grow(self, groups: Sequence[PageChanges]) -> None:
        """What tables of each group have grown by."""
        for tables, changes in zip(self._tables, groups, strict=False):
            if changes.grown:
                slots, indices, pages = np.array(changes.grown).T
                tables[slots, indices] = pages

    def build(self, plan: Step) -> StepArrays:
        """The arrays of a plan whose joins and growth were applied. It has at least one row."""
        slots, starts = np.array(plan.slots), np.array(plan.starts)
        counts, samples = np.array(plan.counts), np.array(plan.samples)
        single = counts == 1
        decode_rows = int(single.sum())
        in_order = bool(single[:decode_rows].all())
        order = np.arange(len(slots)) if in_order else np.argsort(~single, kind="stable")
        its_slots, its_starts, its_counts = slots[order], starts[order], counts[order]
        ends = its_starts + its_counts

        query_starts = np.zeros(len(slots) + 1, np.int64)
        np.cumsum(its_counts, out=query_starts[1:])
        if decode_rows == len(slots):
            token_slots, positions = its_slots, its_starts
        else:
            token_slots = np.repeat(its_slots, its_counts)
            positions = _spread(its_starts, its_counts)
        size = self._block_size
        pages = self._tables[:, token_slots, positions // size].astype(np.int64, order="C")
        width = -(-int(ends.max()) // size)

        first_tokens = np.empty_like(slots)
        first_tokens[order] = query_starts[:-1]
        draw_rows = np.repeat(np.arange(len(slots)), samples)
        back = _spread(-samples, samples)  # -1 for a row's last draw, -2 for the one before
        return StepArrays(
            token_slots=token_slots,
            positions=positions,
            slot_mapping=pages * size + positions % size,
            block_tables=np.ascontiguousarray(self._tables[:, its_slots, :width]),
            seq_lens=ends.astype(np.int32),
            query_starts=query_starts.astype(np.int32),
            starts=its_starts.tolist(),
            counts=its_counts.tolist(),
            decode_rows=decode_rows,
            first_tokens=first_tokens,
            draw_rows=draw_rows,
            draw_tokens=(first_tokens + counts)[draw_rows] + back,
            draw_slots=slots[draw_rows],
            draw_positions=(starts + counts)[draw_rows] + back + 1,
            draw_last=back == -1,
            sequences=self._sequences[its_slots].tolist(),
        )


def _spread(firsts: I64, counts: I64) -> I64:
    """`firsts[r], firsts[r] + 1, ...`, `counts[r]` numbers for each `r`, one after the other."""
    ends = np.cumsum(counts)
    total = int(ends[-1])
    return np.arange(total) + np.repeat(firsts - ends + counts, counts)
