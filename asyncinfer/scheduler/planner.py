"""`Planner`: builds one step out of the sequences there are."""

from __future__ import annotations

from itertools import islice

from asyncinfer.scheduler.admitter import Admitter
from asyncinfer.scheduler.counters import Counters
from asyncinfer.scheduler.sequence import Sequence
from asyncinfer.scheduler.sequence_states import SequenceStates
from asyncinfer.scheduler.step import Step
from asyncinfer.scheduler.step_budget import StepBudget
from asyncinfer.scheduler.step_runner import RunnerSpec

__all__ = ["Planner"]


class Planner:
    """Decode rows first, then chunks of prompts already begun, then admission, all under one
    budget of query tokens."""

    def __init__(self, spec: RunnerSpec, states: SequenceStates, counters: Counters) -> None:
        self._block_size = spec.block_size
        self.budget = StepBudget(spec.max_step_tokens)
        self._states = states
        self._slots = states.slots
        self._blocks = states.slots.blocks
        self._admitter = Admitter(spec.block_size, states, counters)

    def plan(self, number: int) -> Step | None:
        """The next step; None if there is nothing to compute."""
        states, step = self._states, Step(number)
        tokens = rows = self.budget.tokens
        if states.prefilling:
            # More sequences may decode than a small step has room for.
            rows -= tokens // 4
        self._secure(rows)
        # One token of every decoding sequence, or of as many as there are `rows`, in turns.
        step.add_decodes(islice(states.decoding.values(), rows))
        if len(states.decoding) > rows:
            states.rotate(rows)
        budget = self._prefill(step, tokens - step.decodes)
        self._admitter.admit(step, budget)
        if not step.sequences:
            return None
        self._slots.flush(step)
        return step

    def _secure(self, rows: int) -> None:
        """See that every running sequence that is out of room gets a block, by preemption where
        there are none left. One whose block comes free only with a step in flight waits for it."""
        states = self._states
        decoding = islice(states.decoding.values(), rows)
        needy = [r for r in decoding if r.computed == r.capacity and r.draws_left]
        if min(len(states.decoding), rows) < self.budget.tokens:
            needy += [r for r in states.prefilling.values() if r.computed == r.capacity]
        if len(needy) > self._blocks.available:
            needy = self._relieve(needy)
        for sequence in needy:
            self._slots.grow(sequence, 1)

    def _relieve(self, needy: list[Sequence]) -> list[Sequence]:
        """Preempt until the needy sequences can have a block each: paused sequences first, then
        running ones, the worst-ranked first. The oldest running sequence is never a victim and is
        served first, so that it always moves on. Returns those who can have their block now."""
        states = self._states
        states.trim()
        oldest = min(states.running(), key=lambda r: r.id)
        others = states.ranked(r for r in states.running() if r is not oldest)
        victims = others + states.ranked(states.sleeping())
        wanting = {r.id for r in needy}
        while victims and len(wanting) > states.expected():
            victim = victims.pop()
            wanting.discard(victim.id)
            states.preempt(victim)
        served = [r for r in [oldest, *others] if r.id in wanting]
        return served[: self._blocks.available]

    def _prefill(self, step: Step, budget: int) -> int:
        """Chunks of the prompts already begun, first admitted first. Returns what is left."""
        for sequence in list(self._states.prefilling.values()):
            spare = self._blocks.available * self._block_size
            chunk = min(sequence.chunk(budget), sequence.capacity + spare - sequence.computed)
            if chunk > 0:
                missing = self._blocks.missing(sequence, sequence.computed + chunk)
                self._slots.grow(sequence, missing)
                if step.add_chunk(sequence, chunk):
                    self._states.decode(sequence)
                budget -= chunk
        return budget
