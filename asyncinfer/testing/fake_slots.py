"""`FakeSlots`: what a runner knows of its slots, from steps alone, and whether steps make sense."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from asyncinfer.scheduler import ForcedTokens, Join, RunnerSpec, Step
from asyncinfer.testing.oracle import MASK

__all__ = ["FakeSlots"]


class FakeSlots:
    """The fake model's state by slot. A step that contradicts it raises `AssertionError`."""

    def __init__(self, spec: RunnerSpec) -> None:
        self._spec = spec
        slots = spec.max_slots
        self.joins: list[Join | None] = [None] * slots
        #: Block tables `[groups, slots, blocks]`, -1 where there is no page; entries behind a
        #: window stay as they were.
        self.tables = np.full((len(spec.groups), slots, spec.table_width), -1, np.int64)
        #: Tokens `[slots, positions]`, those just drawn included.
        self.history = np.zeros((slots, spec.max_context + 1), np.int64)
        #: Tokens in the KV cache (-1: not told yet) and tokens known.
        self.computed = np.zeros(slots, np.int64)
        self.known = np.zeros(slots, np.int64)
        self.seeds: npt.NDArray[np.uint64] = np.zeros(slots, np.uint64)
        self.sampled = np.zeros(slots, np.bool_)
        #: Slots that want logprobs, or whose draws step over stop tokens at first.
        self.special: set[int] = set()

    def apply(self, step: Step) -> None:
        """Apply the leaves, joins and grown tables of a step."""
        for slot in step.leaves:
            assert self.joins[slot] is not None, f"slot {slot} leaves twice"
            self.joins[slot] = None
            self.tables[:, slot] = -1
            self.special.discard(slot)
        for join in step.joins:
            self._join(join)
        for forced in step.forced:
            self._force(forced)
        for group, tables, changes in zip(
            self._spec.groups, self.tables, step.groups, strict=False
        ):
            for slot, index, page in changes.grown:
                assert self.joins[slot] is not None, f"table of empty slot {slot} grows"
                assert tables[slot, index] == -1, f"slot {slot}: entry {index} set twice"
                gap = group.window is None and index > 0 and tables[slot, index - 1] < 0
                assert not gap, f"slot {slot}: gap at {index}"
                tables[slot, index] = page

    def _join(self, join: Join) -> None:
        slot, known = join.slot, len(join.token_ids)
        assert self.joins[slot] is None, f"slot {slot} is taken"
        assert 1 <= join.prompt_len <= known <= self._spec.max_context
        self.joins[slot] = join
        for table, pages in zip(self.tables, join.tables, strict=True):
            table[slot, : len(pages)] = pages
        self.history[slot, :known] = join.token_ids
        self.known[slot] = known
        self.computed[slot] = -1
        params = join.params
        self.sampled[slot] = not params.greedy
        self.seeds[slot] = join.seed & MASK
        scored = params.alternatives is not None or join.candidates
        if scored or (params.min_tokens and join.stop_ids):
            self.special.add(slot)

    def _force(self, forced: ForcedTokens) -> None:
        slot, end = forced.slot, forced.start + len(forced.token_ids)
        assert self.joins[slot] is not None, f"tokens forced on empty slot {slot}"
        assert forced.start == self.known[slot], f"slot {slot}: forced tokens after a gap"
        self.history[slot, forced.start : end] = forced.token_ids
        self.known[slot] = end

    def check(self, step: Step) -> None:
        """Check that the rows of a step fit what the slots hold."""
        spec, rows = self._spec, len(step.slots)
        assert rows, "an empty step"
        assert len(step.starts) == len(step.counts) == len(step.samples) == rows
        assert step.tokens <= spec.max_step_tokens, "over the token budget"
        assert len(set(step.slots)) == rows, "a slot twice"
        joined = {join.slot for join in step.joins}
        assert joined <= set(step.slots), "a join without a row"
        slots = np.array(step.slots)
        starts, counts = np.array(step.starts), np.array(step.counts)
        ends = starts + counts
        assert all(self.joins[slot] is not None for slot in step.slots), "a row of an empty slot"
        assert (counts >= 1).all()
        assert (starts >= 0).all()
        computed = self.computed[slots]
        assert ((computed == starts) | (computed == -1)).all(), "a row skips or repeats tokens"
        assert (ends <= self.known[slots]).all(), "a row computes tokens nobody knows"
        draws = np.array(step.samples)
        assert (((draws == 1) & (ends == self.known[slots])) | (draws == 0)).all()
        assert (self.known[slots] + draws <= spec.max_context).all(), "beyond the context"
        last = self.tables[:, slots, (ends - 1) // spec.block_size]
        most = np.array([[group.num_pages] for group in spec.groups])
        assert ((last >= 0) & (last < most)).all(), "a block table too short"

    def joined(self, slot: int) -> Join:
        join = self.joins[slot]
        assert join is not None
        return join
