"""`FakeSlots`: what a runner knows of its slots, from plans alone, and whether plans make sense."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from asyncinfer.scheduler import Join, RunnerSpec, Step
from asyncinfer.testing.oracle import MASK

__all__ = ["FakeSlots"]


class FakeSlots:
    """The fake model's state by slot. A plan that contradicts it raises `AssertionError`."""

    def __init__(self, spec: RunnerSpec) -> None:
        self._spec = spec
        slots = spec.max_slots
        self.tenants: list[Join | None] = [None] * slots
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

    def apply(self, plan: Step) -> None:
        """Leaves, joins and grown tables of a plan."""
        for slot in plan.leaves:
            assert self.tenants[slot] is not None, f"slot {slot} leaves twice"
            self.tenants[slot] = None
            self.tables[:, slot] = -1
            self.special.discard(slot)
        for join in plan.joins:
            self._join(join)
        for group, tables, changes in zip(
            self._spec.groups, self.tables, plan.groups, strict=False
        ):
            for slot, index, page in changes.grown:
                assert self.tenants[slot] is not None, f"table of empty slot {slot} grows"
                assert tables[slot, index] == -1, f"slot {slot}: entry {index} set twice"
                gap = group.window is None and index > 0 and tables[slot, index - 1] < 0
                assert not gap, f"slot {slot}: gap at {index}"
                tables[slot, index] = page

    def _join(self, join: Join) -> None:
        slot, known = join.slot, len(join.token_ids)
        assert self.tenants[slot] is None, f"slot {slot} is taken"
        assert 1 <= join.prompt_len <= known <= self._spec.max_context
        self.tenants[slot] = join
        for table, pages in zip(self.tables, join.tables, strict=True):
            table[slot, : len(pages)] = pages
        self.history[slot, :known] = join.token_ids
        self.known[slot] = known
        self.computed[slot] = -1
        params = join.params
        self.sampled[slot] = not params.greedy
        self.seeds[slot] = join.seed & MASK
        if params.logprobs is not None or (params.min_tokens and join.stop_ids):
            self.special.add(slot)

    def check(self, plan: Step) -> None:
        """The rows fit what the slots hold."""
        spec, rows = self._spec, len(plan.slots)
        assert rows, "an empty plan"
        assert len(plan.starts) == len(plan.counts) == len(plan.samples) == rows
        assert plan.tokens <= spec.max_step_tokens, "over the token budget"
        assert len(set(plan.slots)) == rows, "a slot twice"
        joined = {join.slot for join in plan.joins}
        assert joined <= set(plan.slots), "a join without a row"
        slots = np.array(plan.slots)
        starts, counts = np.array(plan.starts), np.array(plan.counts)
        ends = starts + counts
        assert all(self.tenants[slot] is not None for slot in plan.slots), "a row of no tenant"
        assert (counts >= 1).all()
        assert (starts >= 0).all()
        computed = self.computed[slots]
        assert ((computed == starts) | (computed == -1)).all(), "a row skips or repeats tokens"
        assert (ends <= self.known[slots]).all(), "a row computes tokens nobody knows"
        draws = np.array(plan.samples)
        assert (((draws == 1) & (ends == self.known[slots])) | (draws == 0)).all()
        assert (self.known[slots] + draws <= spec.max_context).all(), "beyond the context"
        last = self.tables[:, slots, (ends - 1) // spec.block_size]
        most = np.array([[group.num_pages] for group in spec.groups])
        assert ((last >= 0) & (last < most)).all(), "a block table too short"

    def tenant(self, slot: int) -> Join:
        join = self.tenants[slot]
        assert join is not None
        return join
