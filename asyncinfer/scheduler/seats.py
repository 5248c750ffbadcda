"""`Seats`: slots and block tables of the requests on the runner, and what it must be told."""

from __future__ import annotations

from collections.abc import Sequence

from asyncinfer.cache.block_manager import BlockManager
from asyncinfer.cache.prefix_cache import CacheEntry, PrefixCache
from asyncinfer.scheduler.plan import Join, PageChanges, RunnerSpec, StepPlan
from asyncinfer.scheduler.request import Request

__all__ = ["Seats"]


class Seats:
    """Gives a request a slot and block tables, lets the tables grow, takes both back; collects
    the deltas of the next plan."""

    def __init__(self, spec: RunnerSpec, cache: PrefixCache | None) -> None:
        self.blocks = BlockManager.of(spec.groups, spec.block_size, cache)
        #: Slot -> request.
        self.tenants: list[Request | None] = [None] * spec.max_slots
        #: Slots without a tenant.
        self.free = list(range(spec.max_slots - 1, -1, -1))
        self._leaves: list[int] = []
        self._changes = [PageChanges() for _ in spec.groups]

    def seat(self, request: Request, entries: Sequence[CacheEntry]) -> None:
        """A free slot, and tables that start with the cached blocks."""
        self._take_slot(request)
        self.blocks.open(request, entries)
        request.computed = request.committed = request.room

    def seat_fork(self, request: Request, parent: Request) -> None:
        """A free slot, and tables with all of the parent's prompt but its last token. The next plan
        has what is to be copied."""
        self._take_slot(request)
        length = request.prompt_len - 1
        copies = self.blocks.fork(request, parent, length)
        for changes, copy in zip(self._changes, copies, strict=False):
            changes.copies.append(copy)
        request.computed = request.committed = length

    def unpin(self, plan: StepPlan) -> None:
        """The step is over: the sources of what it copied are needed for it no more."""
        for group, changes in zip(self.blocks.groups, plan.groups, strict=False):
            for source, _ in changes.copies:
                group.release(source)

    def join(self, request: Request) -> Join:
        """What the runner must know of a request just seated."""
        return Join(
            slot=request.slot,
            token_ids=list(request.tokens),
            prompt_len=request.prompt_len,
            tables=[list(table.pages) for table in request.tables],
            params=request.params,
            seed=request.seed,
            stop_ids=request.stop_ids,
            bad_ids=request.bad_ids,
            samplers=request.samplers,
        )

    def grow(self, request: Request, count: int) -> None:
        """Append blocks to the tables of a request the runner knows."""
        first, slot = request.room // self.blocks.block_size, request.slot
        self.blocks.grow(request, count)
        for changes, table in zip(self._changes, request.tables, strict=True):
            for index in range(first, first + count):
                changes.grown.append((slot, index, table.pages[index]))

    def vacate(self, request: Request) -> None:
        """Take back slot and blocks. No step in flight may use them."""
        assert not request.in_flight
        slot = request.slot
        self.blocks.close(request)
        request.committed = request.computed = 0
        request.slot = -1
        self.tenants[slot] = None
        self.free.append(slot)
        self._leaves.append(slot)
        for changes in self._changes:
            changes.grown = [entry for entry in changes.grown if entry[0] != slot]

    def flush(self, plan: StepPlan) -> None:
        """Move the deltas since the last plan into this one."""
        plan.leaves, self._leaves = self._leaves, []
        if any(changes.grown or changes.copies for changes in self._changes):
            plan.groups, self._changes = self._changes, [PageChanges() for _ in self._changes]

    def _take_slot(self, request: Request) -> None:
        request.slot = slot = self.free.pop()
        self.tenants[slot] = request
