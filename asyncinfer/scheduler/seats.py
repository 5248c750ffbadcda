"""`Seats`: slots and block tables of the requests on the runner, and what it must be told."""

from __future__ import annotations

from collections.abc import Sequence

from asyncinfer.cache.block_manager import BlockManager
from asyncinfer.cache.prefix_cache import CacheEntry, PrefixCache
from asyncinfer.cache.window_pool import WindowPool
from asyncinfer.scheduler.plan import Join, RunnerSpec, StepPlan
from asyncinfer.scheduler.request import Request

__all__ = ["Seats"]


class Seats:
    """Gives a request a slot and a block table, lets the table grow, takes both back; collects
    the deltas of the next plan."""

    def __init__(self, spec: RunnerSpec, cache: PrefixCache | None) -> None:
        windows = None
        if spec.window is not None:
            windows = WindowPool(spec.window_pages, spec.window, spec.block_size)
        self.blocks = BlockManager(spec.num_blocks, spec.block_size, cache, windows)
        #: Slot -> request.
        self.tenants: list[Request | None] = [None] * spec.max_slots
        #: Slots without a tenant.
        self.free = list(range(spec.max_slots - 1, -1, -1))
        self._leaves: list[int] = []
        self._grown: list[tuple[int, int, int]] = []
        self._grown_pages: list[tuple[int, int, int]] = []

    def seat(self, request: Request, entries: Sequence[CacheEntry]) -> None:
        """A free slot, and a table that starts with the cached blocks."""
        self._take_slot(request)
        self.blocks.open(request, entries)
        request.computed = request.committed = request.room

    def seat_fork(self, request: Request, parent: Request) -> tuple[int, int] | None:
        """A free slot, and a table with all of the parent's prompt but its last token. Returns
        the block to copy, whose source is pinned, and the target."""
        self._take_slot(request)
        length = request.prompt_len - 1
        copy = self.blocks.fork(request, parent, length)
        request.computed = request.committed = length
        return copy

    def copied_pages(self, request: Request, parent: Request) -> tuple[int, int]:
        """The window page to copy when `seat_fork` gave a block, whose source is pinned, and the
        target."""
        return self.blocks.copied_pages(request, parent, request.prompt_len - 1)

    def join(self, request: Request) -> Join:
        """What the runner must know of a request just seated."""
        return Join(
            slot=request.slot,
            token_ids=list(request.tokens),
            prompt_len=request.prompt_len,
            blocks=list(request.blocks),
            params=request.params,
            seed=request.seed,
            stop_ids=request.stop_ids,
            bad_ids=request.bad_ids,
            samplers=request.samplers,
            pages=list(request.pages),
        )

    def grow(self, request: Request, count: int) -> None:
        """Append blocks to the table of a request the runner knows."""
        first, slot = len(request.blocks), request.slot
        self.blocks.grow(request, count)
        for index in range(first, first + count):
            self._grown.append((slot, index, request.blocks[index]))
        if self.blocks.windows is not None:
            for index, page in enumerate(request.pages[first:], first):
                self._grown_pages.append((slot, index, page))

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
        if self._grown:
            self._grown = [entry for entry in self._grown if entry[0] != slot]
            self._grown_pages = [entry for entry in self._grown_pages if entry[0] != slot]

    def flush(self, plan: StepPlan) -> None:
        """Move the deltas since the last plan into this one."""
        plan.leaves, self._leaves = self._leaves, []
        plan.grown, self._grown = self._grown, []
        plan.grown_pages, self._grown_pages = self._grown_pages, []

    def _take_slot(self, request: Request) -> None:
        request.slot = slot = self.free.pop()
        self.tenants[slot] = request
