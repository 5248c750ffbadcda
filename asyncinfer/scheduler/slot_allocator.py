"""`SlotAllocator`: slots and block tables of the sequences on the runner."""

from __future__ import annotations

from collections import abc

from asyncinfer.cache.block_manager import BlockManager
from asyncinfer.cache.prefix_cache import CacheEntry, PrefixCache
from asyncinfer.scheduler.sequence import Sequence
from asyncinfer.scheduler.step import Join, PageChanges, Step
from asyncinfer.scheduler.step_runner import RunnerSpec

__all__ = ["SlotAllocator"]


class SlotAllocator:
    """Gives a sequence a slot and block tables, lets the tables grow, and takes both back. It
    collects what the runner must be told with the next step."""

    def __init__(self, spec: RunnerSpec, cache: PrefixCache | None) -> None:
        self.blocks = BlockManager.of(spec.groups, spec.block_size, cache)
        #: Slot -> sequence.
        self.tenants: list[Sequence | None] = [None] * spec.max_slots
        #: Slots without a tenant.
        self.free = list(range(spec.max_slots - 1, -1, -1))
        self._leaves: list[int] = []
        self._changes = [PageChanges() for _ in spec.groups]

    def seat(self, sequence: Sequence, entries: abc.Sequence[CacheEntry]) -> None:
        """Give a free slot, and tables that start with the cached blocks."""
        self._take_slot(sequence)
        self.blocks.open(sequence, entries)
        sequence.computed = sequence.committed = sequence.capacity

    def seat_fork(self, sequence: Sequence, parent: Sequence) -> None:
        """Give a free slot, and tables with all of the parent's prompt but its last token. The next
        step copies the partly filled page."""
        self._take_slot(sequence)
        length = sequence.prompt_len - 1
        copies = self.blocks.fork(sequence, parent, length)
        for changes, copy in zip(self._changes, copies, strict=False):
            changes.copies.append(copy)
        sequence.computed = sequence.committed = length

    def unpin(self, step: Step) -> None:
        """The step is over, and needs the sources of its copies no more."""
        for group, changes in zip(self.blocks.groups, step.groups, strict=False):
            for source, _ in changes.copies:
                group.release(source)

    def join(self, sequence: Sequence) -> Join:
        """What the runner must know of a sequence just seated."""
        return Join(
            slot=sequence.slot,
            token_ids=list(sequence.tokens),
            prompt_len=sequence.prompt_len,
            tables=[list(table.pages) for table in sequence.tables],
            params=sequence.params,
            seed=sequence.seed,
            stop_ids=sequence.stop_ids,
            bad_ids=sequence.bad_ids,
            samplers=sequence.samplers,
        )

    def grow(self, sequence: Sequence, count: int) -> None:
        """Append blocks to the tables of a sequence the runner knows."""
        first, slot = sequence.capacity // self.blocks.block_size, sequence.slot
        self.blocks.grow(sequence, count)
        for changes, table in zip(self._changes, sequence.tables, strict=True):
            for index in range(first, first + count):
                changes.grown.append((slot, index, table.pages[index]))

    def vacate(self, sequence: Sequence) -> None:
        """Take back slot and pages. No step in flight may use them."""
        assert not sequence.in_flight
        slot = sequence.slot
        self.blocks.close(sequence)
        sequence.committed = sequence.computed = 0
        sequence.slot = -1
        self.tenants[slot] = None
        self.free.append(slot)
        self._leaves.append(slot)
        for changes in self._changes:
            changes.grown = [entry for entry in changes.grown if entry[0] != slot]

    def flush(self, step: Step) -> None:
        """Move what has changed since the last step into this one."""
        step.leaves, self._leaves = self._leaves, []
        if any(changes.grown or changes.copies for changes in self._changes):
            step.groups, self._changes = self._changes, [PageChanges() for _ in self._changes]

    def _take_slot(self, sequence: Sequence) -> None:
        sequence.slot = slot = self.free.pop()
        self.tenants[slot] = sequence
