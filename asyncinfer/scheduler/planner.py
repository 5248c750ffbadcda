"""`Planner` builds one step from the sequences there are. `StepBudget` bounds the tokens of a
step."""

from __future__ import annotations

from itertools import chain, islice

from asyncinfer.scheduler.admitter import Admitter
from asyncinfer.scheduler.counters import Counters
from asyncinfer.scheduler.drafts import Drafts
from asyncinfer.scheduler.page_forecast import expected_blocks
from asyncinfer.scheduler.pairs import Pairs
from asyncinfer.scheduler.prompt_pace import PromptPace
from asyncinfer.scheduler.sequence import Sequence
from asyncinfer.scheduler.sequence_states import SequenceStates
from asyncinfer.scheduler.step import Step
from asyncinfer.scheduler.step_runner import RunnerSpec
from asyncinfer.speculation import Drafter

__all__ = ["Planner", "StepBudget"]

#: Steps computed before the budget doubles again, at first and at most.
PATIENCE = 8
MOST_PATIENCE = 1024


class Planner:
    """Fills a step in this order, under one budget of query tokens: decode rows, chunks of prompts
    already begun, new requests. Beside answers, `PromptPace` bounds prompts as well."""

    def __init__(self, spec: RunnerSpec, states: SequenceStates, counters: Counters) -> None:
        self._block_size = spec.block_size
        self.budget = StepBudget(spec.max_step_tokens)
        self.pace = PromptPace(spec.step_target, spec.block_size, states.speculator.costs)
        self._states = states
        self._slots = states.slots
        self._blocks = states.slots.blocks
        self._drafts = Drafts(states)
        self._pairs = Pairs(states, self._drafts)
        whole = spec.whole_prompts
        self._admitter = Admitter(
            spec.block_size, states, counters, self._pairs, whole_prompts=whole
        )

    def plan(self, number: int) -> Step | None:
        """The next step; None if there is nothing to compute."""
        states, step = self._states, Step(number)
        if states.resting:
            states.wake()
        tokens = rows = self.budget.tokens
        if states.prefilling or states.stepwise:
            # More sequences may decode than a small step has room for.
            rows -= tokens // 4
        self._grow_tables(rows)
        # One token of every decoding sequence, or of as many as there are `rows`, in turns.
        step.add_decodes(islice(states.decoding.values(), rows))
        if len(states.decoding) > rows:
            states.rotate(rows)
        budget = self._add_chunks(step, tokens - step.decodes)
        if states.queue.size:
            self._admitter.admit(step, budget)
        if not step.sequences:
            return None
        step.began = states.now
        self._slots.flush(step)
        return step

    def _grow_tables(self, rows: int) -> None:
        """Give a block to every running sequence whose tables are full, by preemption where none is
        left. A sequence whose block comes free only after a step in flight waits for that step."""
        states = self._states
        decoding = islice(states.decoding.values(), rows)
        needy = [r for r in decoding if r.computed == r.capacity and r.draws_left]
        if min(len(states.decoding), rows) < self.budget.tokens:
            others = chain(states.stepwise.values(), states.prefilling.values())
            # A prompt without an answer may have nothing left to compute.
            needy += [
                r for r in others if r.computed == r.capacity and r.chunk(1) and not _awaits(r)
            ]
        if needy and len(needy) > self._blocks.available:
            needy = self._relieve(needy)
        if needy:
            self._slots.grow_each(needy)

    def _relieve(self, needy: list[Sequence]) -> list[Sequence]:
        """Preempt until the needy sequences can have a block each: paused sequences first, then
        running ones, the worst-ranked first. The oldest running sequence is never a victim and is
        served first, so that it always moves on. Returns those who can have their block now."""
        states = self._states
        states.trim()
        oldest = min(states.running(), key=lambda r: r.id)
        # A guide goes with the one that it guides, which came just before it.
        others = states.ranked(r for r in states.running() if r is not oldest and not r.guides)
        victims = others + states.ranked(r for r in states.sleeping() if not r.guides)
        wanting = {r.id for r in needy}
        while victims and len(wanting) > expected_blocks(states):
            victim = victims.pop()
            wanting -= {each.id for each in (victim, victim.guide) if each is not None}
            states.preempt(victim)
        pairs = [(r, r.guide) for r in [oldest, *others]]
        served = [r for pair in pairs for r in pair if r is not None and r.id in wanting]
        return served[: self._blocks.available]

    def _add_chunks(self, step: Step, budget: int) -> int:
        """Add a row for each stepwise sequence, with its draft; then chunks of the prompts already
        begun, first admitted first. Returns what is left of the budget."""
        states = self._states
        stepwise = [r for r in states.stepwise.values() if not (_awaits(r) or r.guide or r.guides)]
        pairs = self._pairs.going_on() if states.paired else []
        room = self._drafts.make(step, [*pairs, *stepwise], budget) if pairs or stepwise else 0
        if pairs:
            budget, room = self._pairs.add_answers(step, pairs, budget, room)
        step.answers = len(step.sequences)
        for sequence in stepwise:
            chunk = self._chunk(sequence, budget)
            if chunk > 0:
                draft = self._drafts.cut(sequence, chunk, room)
                draws = step.add_chunk(sequence, chunk, draft)
                step.answers += 1
                room -= len(draft)
                budget -= chunk + len(draft)
                if draws and chunk == 1 and sequence.drafter is not None:
                    self._rest(sequence, sequence.drafter)
        if states.prefilling or states.queue.size:
            budget = int(min(budget, self.pace.room(step.answers)))
        if states.paired:
            budget = self._pairs.add_prompts(step, budget)
        for sequence in list(states.prefilling.values()):
            if sequence.guide or sequence.guides:
                continue
            chunk = self._chunk(sequence, budget)
            if chunk > 0:
                if step.add_chunk(sequence, chunk):
                    states.decode(sequence)
                budget -= chunk
        if budget <= 0:
            # The last ones found no budget left: those that got a row go to the end of the line.
            for sequence in stepwise:
                if sequence.in_flight and not sequence.resting:
                    states.stepwise[sequence.id] = states.stepwise.pop(sequence.id)
        return budget

    def _chunk(self, sequence: Sequence, budget: int) -> int:
        """Tokens of the sequence for this step, with blocks for them."""
        spare = self._blocks.available * self._block_size
        chunk = min(sequence.chunk(budget), sequence.capacity + spare - sequence.computed)
        if chunk > 0:
            missing = self._blocks.missing(sequence, sequence.computed + chunk)
            self._slots.grow(sequence, missing)
        return chunk

    def _rest(self, sequence: Sequence, drafter: Drafter) -> None:
        """Let a sequence that has no draft go on without waiting for its rows, if none will be made
        for its next tokens. It is computed but for the token that is drawn now."""
        others = sequence.matcher is not None or sequence.reasoning is not None
        if not others and not sequence.drafted and drafter.resting_until > sequence.total_known:
            self._states.rest(sequence)


def _awaits(sequence: Sequence) -> bool:
    """Whether the sequence's next row needs what a step in flight draws."""
    return sequence.in_flight > 0 and sequence.stepwise


class StepBudget:
    """How many query tokens a step may have: all that the runner takes, until the device has no
    room for a step, and then half of that step.

    After `PATIENCE` computed steps it doubles. Every lack of room doubles the patience, too: where
    the device is small for good, next to no step is computed in vain.
    """

    def __init__(self, most: int) -> None:
        #: Query tokens of the next step.
        self.tokens = most
        self._most = most
        self._patience = PATIENCE
        self._computed = 0

    def shrink(self, tokens: int) -> None:
        """A step of so many query tokens was too large. Preempting would not help, for blocks are
        allocated whether or not they are used."""
        self.tokens = max(1, tokens // 2)
        self._patience = min(MOST_PATIENCE, 2 * self._patience)
        self._computed = 0

    def computed(self, *, retried: bool) -> None:
        """A step was computed. `retried`: it held a part of a prompt that had no room before. Such
        a step does not count, as the request fails if there is no room again."""
        if self.tokens == self._most and self._patience == PATIENCE:
            return
        self._computed = 0 if retried else self._computed + 1
        if self._computed < self._patience:
            return
        self._computed = 0
        if self.tokens < self._most:
            self.tokens = min(self._most, 2 * self.tokens)
        else:
            self._patience //= 2
