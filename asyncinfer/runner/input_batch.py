"""`InputBatch`: from a step's plan to the arrays that the model and the sampler are given."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from asyncinfer.scheduler.plan import Join, RunnerSpec, StepPlan

__all__ = ["InputBatch", "StepArrays", "table_width"]

I32 = npt.NDArray[np.int32]
I64 = npt.NDArray[np.int64]


@dataclass(slots=True)
class StepArrays:
    """One step, on the host. Rows of one query token come first; draws are in the plan's order."""

    #: Slot and position of each query token, and where its KV goes, `[tokens]`.
    token_slots: I64
    positions: I64
    slot_mapping: I64
    #: `[rows, blocks]`, `[rows]`, `[rows + 1]`: see `AttentionBatch`.
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
    #: As `slot_mapping` and `block_tables`, of window pages; None without windows.
    window_mapping: I64 | None = None
    window_tables: I32 | None = None

    @classmethod
    def of_single_rows(cls, positions: I64, slot_mapping: I64, block_tables: I32) -> StepArrays:
        """Rows of one query token each, in slots of their own, that draw nothing."""
        rows = np.arange(len(positions))
        none = rows[:0]
        return cls(
            token_slots=rows,
            positions=positions,
            slot_mapping=slot_mapping,
            block_tables=block_tables,
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
        """`tables` int32 `[slots, blocks]` is where the block tables are kept, if somebody else
        wants to see them too. Where there are windows, each is followed by the table of window
        pages, as long again."""
        self._block_size = spec.block_size
        width = -(-spec.max_context // spec.block_size)
        if tables is None:
            tables = np.zeros((spec.max_slots, table_width(spec)), np.int32)
        self._tables: I32 = tables[:, :width]
        self._pages: I32 | None = None if spec.window is None else tables[:, width:]
        self.prompt_lens: I64 = np.zeros(spec.max_slots, np.int64)
        self._sequences: I64 = np.zeros(spec.max_slots, np.int64)
        self._joined = 0

    def join(self, join: Join) -> None:
        """The slot's table is now `join.blocks`."""
        table = self._tables[join.slot]
        table[: len(join.blocks)] = join.blocks
        table[len(join.blocks) :] = 0
        if self._pages is not None:
            pages = self._pages[join.slot]
            pages[: len(join.pages)] = np.maximum(join.pages, 0)
            pages[len(join.pages) :] = 0
        self.prompt_lens[join.slot] = join.prompt_len
        self._joined += 1
        self._sequences[join.slot] = self._joined

    def grow(self, grown: list[tuple[int, int, int]]) -> None:
        """Blocks added to tables, `(slot, index, block)` each."""
        if grown:
            slots, indices, blocks = np.array(grown).T
            self._tables[slots, indices] = blocks

    def grow_pages(self, grown: list[tuple[int, int, int]]) -> None:
        """The same of window pages."""
        if grown and self._pages is not None:
            slots, indices, pages = np.array(grown).T
            self._pages[slots, indices] = pages

    def build(self, plan: StepPlan) -> StepArrays:
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
        blocks = self._tables[token_slots, positions // size].astype(np.int64)
        width = -(-int(ends.max()) // size)

        first_tokens = np.empty_like(slots)
        first_tokens[order] = query_starts[:-1]
        draw_rows = np.repeat(np.arange(len(slots)), samples)
        back = _spread(-samples, samples)  # -1 for a row's last draw, -2 for the one before
        window_mapping = window_tables = None
        if self._pages is not None:
            pages = self._pages[token_slots, positions // size].astype(np.int64)
            window_mapping = pages * size + positions % size
            window_tables = self._pages[its_slots, :width]
        return StepArrays(
            token_slots=token_slots,
            positions=positions,
            slot_mapping=blocks * size + positions % size,
            block_tables=self._tables[its_slots, :width],
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
            window_mapping=window_mapping,
            window_tables=window_tables,
        )


def table_width(spec: RunnerSpec) -> int:
    """Entries of a slot's tables: blocks, and window pages where there are any."""
    width = -(-spec.max_context // spec.block_size)
    return width if spec.window is None else 2 * width


def _spread(firsts: I64, counts: I64) -> I64:
    """`firsts[r], firsts[r] + 1, ...`, `counts[r]` numbers for each `r`, one after the other."""
    ends = np.cumsum(counts)
    total = int(ends[-1])
    return np.arange(total) + np.repeat(firsts - ends + counts, counts)
