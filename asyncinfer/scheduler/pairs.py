"""`Pairs`: the rows of sequences that a guide goes beside."""

from __future__ import annotations

from collections import abc

from asyncinfer.cache.block_manager import BlockManager
from asyncinfer.scheduler.drafts import Drafts
from asyncinfer.scheduler.sequence import Sequence
from asyncinfer.scheduler.sequence_states import SequenceStates
from asyncinfer.scheduler.slot_allocator import SlotAllocator
from asyncinfer.scheduler.step import Step

__all__ = ["Pairs"]


class Pairs:
    """Plans a guided sequence and its guide together, one step at a time, since each draw needs the
    logits of both. Their last known tokens are therefore in one step, and the sequence with fewer
    tokens left waits before its last one. Both verify a draft, at as many positions."""

    def __init__(self, states: SequenceStates, drafts: Drafts) -> None:
        self._states = states
        self._drafts = drafts
        self._slots: SlotAllocator = states.slots
        self._blocks: BlockManager = states.slots.blocks

    def going_on(self) -> list[Sequence]:
        """The guided sequences that decode in the next step."""
        return self._ready(answers=True)

    def add_answers(
        self, step: Step, pairs: abc.Sequence[Sequence], budget: int, room: int
    ) -> tuple[int, int]:
        """Add the pairs that decode, with their drafts. Returns what is left of the budget, and of
        the room for drafted tokens."""
        for sequence in pairs:
            count, drafted = self._add(step, sequence, budget, room)
            budget -= count + drafted
            room -= drafted
        return budget, room

    def add_prompts(self, step: Step, budget: int) -> int:
        """Add the pairs whose known tokens are still being computed. Returns what is left of the
        budget."""
        for sequence in self._ready(answers=False):
            budget -= self._add(step, sequence, budget, 0)[0]
        return budget

    def chunks(self, sequence: Sequence, guide: Sequence, budget: int) -> tuple[int, int]:
        """Query tokens of both in a step that has room for `budget`, and pages."""
        left, beside = (each.total_known - each.computed for each in (sequence, guide))
        blocks = self._blocks
        missing = [blocks.missing(each, each.total_known) for each in (sequence, guide)]
        fits = left + beside <= budget and sum(missing) <= blocks.available
        if fits and sequence.chunk(left) == left:
            return left, beside
        count = min(sequence.chunk(max(0, budget)), left - 1)
        count, spare = self._within(sequence, count, blocks.available)
        other, _ = self._within(guide, min(max(0, budget - count), beside - 1), spare)
        return count, other

    def add_rows(
        self,
        step: Step,
        sequence: Sequence,
        counts: tuple[int, int],
        draft: abc.Sequence[int] = (),
    ) -> None:
        """Add the rows of both, which have the pages for them."""
        guide = sequence.guide
        assert guide is not None
        drawing = 0
        for each, count in zip((sequence, guide), counts, strict=True):
            if count > 0 and step.add_chunk(each, count, draft):
                self._states.decode(each)
                drawing += 1
        assert drawing in (0, 2), "both draw, or neither"
        if drawing:
            row = len(step.sequences) - 1
            step.guided[row - 1] = row, sequence.params.guidance_scale

    def _ready(self, *, answers: bool) -> list[Sequence]:
        """Guided sequences that may have a row; `answers`: those that decode, or the others."""
        states = self._states
        ready = []
        for sequence in states.paired.values():
            guide = sequence.guide
            assert guide is not None
            decodes = sequence.id in states.stepwise and guide.id in states.stepwise
            if decodes == answers and not (sequence.in_flight or guide.in_flight):
                ready.append(sequence)
        return ready

    def _add(self, step: Step, sequence: Sequence, budget: int, room: int) -> tuple[int, int]:
        """Add the rows of a pair, as far as the budget goes. Returns how many known and how many
        drafted tokens they compute."""
        states, guide = self._states, sequence.guide
        assert guide is not None
        # A step without other rows has room for a pair, however small steps have become.
        counts = self.chunks(sequence, guide, budget if step.sequences else max(2, budget))
        if not any(counts):
            return 0, 0
        for each, count in zip((sequence, guide), counts, strict=True):
            self._slots.grow(each, self._blocks.missing(each, each.computed + count))
        draft = self._drafts.cut(sequence, counts[0], room)
        self.add_rows(step, sequence, counts, draft)
        # The next step begins with the pairs that found no room in this one.
        states.paired[sequence.id] = states.paired.pop(sequence.id)
        return sum(counts), 2 * len(draft)

    def _within(self, sequence: Sequence, count: int, spare: int) -> tuple[int, int]:
        """As many of these query tokens as `spare` blocks have room for, and the blocks left."""
        blocks = self._blocks
        count = min(count, sequence.capacity + spare * blocks.block_size - sequence.computed)
        return count, spare - blocks.missing(sequence, sequence.computed + count)
