"""`Pairs`: the rows of sequences that a guide goes beside."""

from __future__ import annotations

from asyncinfer.cache.block_manager import BlockManager
from asyncinfer.scheduler.sequence import Sequence
from asyncinfer.scheduler.sequence_states import SequenceStates
from asyncinfer.scheduler.slot_allocator import SlotAllocator
from asyncinfer.scheduler.step import Step

__all__ = ["Pairs"]


class Pairs:
    """Plans a guided sequence and its guide together, one step at a time: each draw of the one
    needs the logits of the other. So the last known tokens of both are in one step, and whichever
    has fewer of them left waits for that before its last one."""

    def __init__(self, states: SequenceStates) -> None:
        self._states = states
        self._slots: SlotAllocator = states.slots
        self._blocks: BlockManager = states.slots.blocks

    def add_answers(self, step: Step, budget: int) -> int:
        """Add the pairs that go on with an answer. Returns what is left of the budget."""
        return self._add(step, budget, answers=True)

    def add_prompts(self, step: Step, budget: int) -> int:
        """Add the pairs whose prompts, or answers after a preemption, are being computed. Returns
        what is left of the budget."""
        return self._add(step, budget, answers=False)

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

    def add_rows(self, step: Step, sequence: Sequence, counts: tuple[int, int]) -> None:
        """Add the rows of both, which have the pages for them."""
        guide = sequence.guide
        assert guide is not None
        drawing = 0
        for each, count in zip((sequence, guide), counts, strict=True):
            if count > 0 and step.add_chunk(each, count):
                self._states.decode(each)
                drawing += 1
        assert drawing in (0, 2), "both draw, or neither"
        if drawing:
            row = len(step.sequences) - 1
            step.guided[row - 1] = row, sequence.params.guidance_scale

    def _add(self, step: Step, budget: int, *, answers: bool) -> int:
        states = self._states
        for sequence in list(states.paired.values()):
            guide = sequence.guide
            assert guide is not None
            decodes = sequence.id in states.stepwise and guide.id in states.stepwise
            if decodes != answers or sequence.in_flight or guide.in_flight:
                continue
            # A step of nothing else has room for a pair, however small steps have become.
            room = budget if step.sequences else max(2, budget)
            counts = self.chunks(sequence, guide, room)
            if not any(counts):
                continue
            for each, count in zip((sequence, guide), counts, strict=True):
                self._slots.grow(each, self._blocks.missing(each, each.computed + count))
            self.add_rows(step, sequence, counts)
            budget -= sum(counts)
            # The next step begins with those that had no room in this one.
            states.paired[sequence.id] = states.paired.pop(sequence.id)
        return budget

    def _within(self, sequence: Sequence, count: int, spare: int) -> tuple[int, int]:
        """As many of these query tokens as `spare` blocks have room for, and the blocks left."""
        blocks = self._blocks
        count = min(count, sequence.capacity + spare * blocks.block_size - sequence.computed)
        return count, spare - blocks.missing(sequence, sequence.computed + count)
