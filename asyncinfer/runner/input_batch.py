"""From a `StepPlan` to the tensors of a forward pass, without a Python loop over rows."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

from asyncinfer.attention import AttentionBatch
from asyncinfer.sampling import TokenHistory, upload
from asyncinfer.scheduler import RunnerSpec, StepPlan

__all__ = ["InputBatch", "StepInput"]

I64 = npt.NDArray[np.int64]


@dataclass(slots=True)
class StepInput:
    """What one step computes."""

    #: int64 `[tokens]` on the device, in the order of `batch`.
    token_ids: torch.Tensor
    positions: torch.Tensor
    batch: AttentionBatch
    #: Of every row of the plan: where its query tokens begin in that order.
    first: I64
    #: One entry per drawn token, in the plan's order: its row, where its hidden state is, its
    #: slot, and where in the sequence it will stand.
    draw_rows: I64
    draw_index: I64
    draw_slots: I64
    draw_positions: I64


class InputBatch:
    """The slots as the host knows them: block tables. Tokens are in `history`, on the device."""

    def __init__(self, spec: RunnerSpec, device: torch.device) -> None:
        self.history = TokenHistory(spec.max_slots, device)
        self._block_size = spec.block_size
        width = -(-spec.max_context // spec.block_size)
        self._tables = np.zeros((spec.max_slots, width), np.int32)

    def apply(self, plan: StepPlan) -> None:
        """Bring the slots up to date. A left slot's table may stay: nothing refers to it."""
        for join in plan.joins:
            self.history.join(join.slot, join.token_ids)
            self._tables[join.slot, : len(join.blocks)] = join.blocks
        if plan.grown:
            slot, index, block = zip(*plan.grown, strict=True)
            self._tables[slot, index] = block

    def build(self, plan: StepPlan) -> StepInput:
        slots = np.array(plan.slots, np.int64)
        starts = np.array(plan.starts, np.int64)
        counts = np.array(plan.counts, np.int64)
        samples = np.array(plan.samples, np.int64)
        rows = len(slots)
        # Rows of one token first: attention computes them together.
        order = np.argsort(counts != 1, kind="stable")
        decode_rows = int((counts == 1).sum())

        row_slots, row_starts, row_counts = slots[order], starts[order], counts[order]
        query_starts = np.zeros(rows + 1, np.int32)
        np.cumsum(row_counts, out=query_starts[1:])
        total = int(query_starts[-1])
        token_slots = np.repeat(row_slots, row_counts)
        positions = np.arange(total) + np.repeat(row_starts - query_starts[:-1], row_counts)
        block, offset = np.divmod(positions, self._block_size)
        slot_mapping = self._tables[token_slots, block] * np.int64(self._block_size) + offset
        seq_lens = row_starts + row_counts
        width = int(seq_lens.max() - 1) // self._block_size + 1

        first = np.empty(rows, np.int64)
        first[order] = query_starts[:-1]
        draw_rows = np.repeat(np.arange(rows), samples)
        # The last `samples` query tokens of a row; usually one.
        nth = np.arange(len(draw_rows)) - np.repeat(np.cumsum(samples) - samples, samples)
        within = (counts - samples)[draw_rows] + nth

        device = self.history.device
        there = upload(
            device,
            self._tables[row_slots, :width],
            seq_lens.astype(np.int32),
            query_starts,
            slot_mapping,
            positions,
        )
        return StepInput(
            token_ids=self.history.read(token_slots, positions),
            positions=there[4],
            batch=AttentionBatch(
                block_tables=there[0],
                seq_lens=there[1],
                query_starts=there[2],
                slot_mapping=there[3],
                starts=row_starts.tolist(),
                counts=row_counts.tolist(),
                block_size=self._block_size,
                decode_rows=decode_rows,
            ),
            first=first,
            draw_rows=draw_rows,
            draw_index=first[draw_rows] + within,
            draw_slots=slots[draw_rows],
            draw_positions=starts[draw_rows] + within + 1,
        )
