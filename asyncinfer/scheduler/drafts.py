"""`Drafts`: the drafts of one step, cut to the tokens and pages that are left."""

from __future__ import annotations

from collections import abc

from asyncinfer.scheduler.sequence import Sequence
from asyncinfer.scheduler.sequence_states import SequenceStates
from asyncinfer.scheduler.step import Step

__all__ = ["Drafts"]


class Drafts:
    """Has drafts made, and cuts them to the tokens and pages that are left. No sequence loses pages
    for another one's draft."""

    def __init__(self, states: SequenceStates) -> None:
        self._states = states
        self._slots = states.slots
        self._blocks = states.slots.blocks

    def make(self, step: Step, sequences: abc.Sequence[Sequence], budget: int) -> int:
        """Have drafts made for those sequences that may have one in this step and go on with their
        answers. Returns how many drafted tokens the step has room for."""
        states = self._states
        rows = [each for one in sequences for each in (one, one.guide) if each is not None]
        room = budget - sum([each.chunk(budget) for each in rows])
        if states.prefilling or states.queue.size:
            # Drafts are guesses, so most of the budget is left to prompts.
            room //= 4
        drafters = []
        for sequence in sequences:
            if sequence.drafter is not None:
                sequence.drafter.known = sequence.tokens
                drafters.append(sequence.drafter)
        if not drafters or room <= 0:
            return 0
        step.read_prompts = states.speculator.draft(
            drafters, step.decodes + len(rows), step.decodes + len(sequences)
        )
        return room

    def cut(self, sequence: Sequence, chunk: int, room: int) -> abc.Sequence[int]:
        """The part of the sequence's draft that fits after its `chunk` query tokens, with pages for
        it and for its guide, if any, which computes the draft as well."""
        drafter, pair = sequence.drafter, [sequence]
        if drafter is None or not drafter.draft or room <= 0:
            return ()
        if sequence.computed + chunk < sequence.total_known:
            return ()
        if sequence.guide is not None:
            pair.append(sequence.guide)
        draft = drafter.draft[: min(room // len(pair), sequence.draws_left - 1)]
        spare = max(0, self._blocks.available - self._states.running_count)
        while draft and sum(self._missing(pair, len(draft))) > spare:
            draft = draft[:-1]
        if sequence.matcher is not None:
            draft = draft[: sequence.matcher.fitting(draft)]
        for each, missing in zip(pair, self._missing(pair, len(draft)), strict=True):
            self._slots.grow(each, missing)
        return draft

    def _missing(self, pair: abc.Sequence[Sequence], drafted: int) -> list[int]:
        """The pages that each of a pair lacks for so many drafted tokens."""
        return [self._blocks.missing(each, each.total_known + drafted) for each in pair]
