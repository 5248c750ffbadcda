"""`SlotAllocator`: slots and block tables of the sequences on the runner."""

from __future__ import annotations

from collections import abc

from asyncinfer.cache.block_manager import BlockManager
from asyncinfer.cache.entry import CacheEntry
from asyncinfer.cache.prefix_cache import PrefixCache
from asyncinfer.scheduler.sequence import Sequence
from asyncinfer.scheduler.step import ForcedTokens, Join, PageChanges, Step
from asyncinfer.scheduler.step_runner import RunnerSpec

__all__ = ["SlotAllocator"]


class SlotAllocator:
    """Gives a sequence a slot and block tables, lets the tables grow, and takes both back. It
    collects what the runner must be told with the next step."""

    def __init__(self, spec: RunnerSpec, cache: PrefixCache | None) -> None:
        self.blocks = BlockManager.of(spec.groups, spec.block_size, cache)
        #: Slot -> sequence.
        self.sequences: list[Sequence | None] = [None] * spec.max_slots
        #: Slots without a sequence.
        self.free = list(range(spec.max_slots - 1, -1, -1))
        self._leaves: list[int] = []
        self._forced: list[ForcedTokens] = []
        self._changes = [PageChanges() for _ in spec.groups]
        #: Numbers of the state groups.
        self._states = [number for number, group in enumerate(spec.groups) if group.state]

    def allocate(self, sequence: Sequence, entries: abc.Sequence[CacheEntry]) -> None:
        """Give a free slot, and tables that start with the cached blocks."""
        self._take_slot(sequence)
        self.blocks.open(sequence, entries)
        sequence.computed = sequence.committed = sequence.capacity

    def allocate_fork(self, sequence: Sequence, parent: Sequence) -> None:
        """Give a free slot, and tables with all of the parent's prompt but its last token. The next
        step copies the partly filled page."""
        self._take_slot(sequence)
        length = len(sequence.tokens) - 1
        copies = self.blocks.fork(sequence, parent, length)
        for changes, copy in zip(self._changes, copies, strict=False):
            changes.copies.append(copy)
        sequence.computed = sequence.committed = length

    def release_sources(self, step: Step) -> None:
        """Release the pages that the step copied from, which was committed or taken back."""
        for group, changes in zip(self.blocks.groups, step.groups, strict=False):
            for source, _ in changes.copies:
                group.release(source)

    def join(self, sequence: Sequence) -> Join:
        """What the runner must know of a sequence that was just given a slot."""
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
            masked=sequence.matcher is not None,
            candidates=sequence.candidates,
            adapter=sequence.adapter_slot,
            paired=sequence.guide is not None or sequence.guides is not None,
        )

    def grow_each(self, sequences: abc.Sequence[Sequence]) -> None:
        """Append one block to the tables of each; the runner knows all of them."""
        self.blocks.grow_each(sequences)
        for group, changes in enumerate(self._changes):
            for sequence in sequences:
                pages = sequence.tables[group].pages
                changes.grown.append((sequence.slot, len(pages) - 1, pages[-1]))

    def force(self, sequence: Sequence, token_ids: abc.Sequence[int]) -> None:
        """Tell the runner the last tokens of a sequence, which it did not draw."""
        start = len(sequence.tokens) - len(token_ids)
        self._forced.append(ForcedTokens(sequence.slot, start, token_ids))

    def rewind(self, sequence: Sequence) -> None:
        """The last tokens that the sequence's row computed do not stand: tell the runner how many
        do, where layers keep states."""
        for number in self._states:
            self._changes[number].rewound.append((sequence.slot, sequence.committed))

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
        self.sequences[slot] = None
        self.free.append(slot)
        self._leaves.append(slot)
        self._forced = [forced for forced in self._forced if forced.slot != slot]
        for changes in self._changes:
            changes.grown = [entry for entry in changes.grown if entry[0] != slot]
            changes.rewound = [entry for entry in changes.rewound if entry[0] != slot]

    def flush(self, step: Step) -> None:
        """Move what has changed since the last step into this one."""
        step.leaves, self._leaves = self._leaves, []
        step.forced, self._forced = self._forced, []
        if any(each.grown or each.copies or each.rewound for each in self._changes):
            step.groups, self._changes = self._changes, [PageChanges() for _ in self._changes]

    def _take_slot(self, sequence: Sequence) -> None:
        sequence.slot = slot = self.free.pop()
        self.sequences[slot] = sequence
