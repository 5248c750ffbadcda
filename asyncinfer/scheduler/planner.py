"""`Planner`: builds one step out of the requests on the roster."""

from __future__ import annotations

from itertools import islice

from asyncinfer.scheduler.boarding import Boarding
from asyncinfer.scheduler.counters import Counters
from asyncinfer.scheduler.flight import Flight
from asyncinfer.scheduler.plan import RunnerSpec, StepPlan
from asyncinfer.scheduler.request import Request
from asyncinfer.scheduler.roster import Roster
from asyncinfer.scheduler.step_budget import StepBudget

__all__ = ["Planner"]


class Planner:
    """Decode rows first, then chunks of prompts already begun, then admission, all under one
    budget of query tokens."""

    def __init__(self, spec: RunnerSpec, roster: Roster, counters: Counters) -> None:
        self._block_size = spec.block_size
        self.budget = StepBudget(spec.max_step_tokens)
        self._roster = roster
        self._seats = roster.seats
        self._blocks = roster.seats.blocks
        self._boarding = Boarding(spec.block_size, roster, counters)

    def plan(self, step: int) -> Flight | None:
        """The next step; None if there is nothing to compute."""
        flight = Flight(StepPlan(step))
        tokens = rows = self.budget.tokens
        if self._roster.prefilling:
            # More requests may decode than a small step has room for.
            rows -= tokens // 4
        self._secure(rows)
        self._decode(flight, rows)
        budget = self._prefill(flight, tokens - flight.decodes)
        self._boarding.admit(flight, budget)
        if not flight.requests:
            return None
        self._seats.flush(flight.plan)
        return flight

    # -- blocks for those that run -------------------------------------------------------------

    def _secure(self, rows: int) -> None:
        """See that every running request that is out of room gets a block, by preemption where
        there are none left. One whose block comes free only with a step in flight waits for it."""
        roster = self._roster
        decoding = islice(roster.decoding.values(), rows)
        needy = [r for r in decoding if r.computed == r.room and r.left]
        if min(len(roster.decoding), rows) < self.budget.tokens:
            needy += [r for r in roster.prefilling.values() if r.computed == r.room]
        if len(needy) > self._blocks.available:
            needy = self._relieve(needy)
        for request in needy:
            self._seats.grow(request, 1)

    def _relieve(self, needy: list[Request]) -> list[Request]:
        """Preempt until the needy requests can have a block each: paused requests first, then
        running ones, the worst-ranked first. The oldest running request is never a victim and is
        served first, so that it always moves on. Returns those who can have their block now."""
        roster = self._roster
        roster.trim()
        oldest = min(roster.running(), key=lambda r: r.id)
        others = roster.ranked(r for r in roster.running() if r is not oldest)
        victims = others + roster.ranked(roster.sleeping())
        wanting = {r.id for r in needy}
        while victims and len(wanting) > roster.expected():
            victim = victims.pop()
            wanting.discard(victim.id)
            roster.preempt(victim)
        served = [r for r in [oldest, *others] if r.id in wanting]
        return served[: self._blocks.available]

    # -- rows ----------------------------------------------------------------------------------

    def _decode(self, flight: Flight, rows: int) -> None:
        """One token of every decoding request, or of as many as there are `rows`, in turns. Runs
        for every token drawn: keep it lean."""
        plan, requests = flight.plan, flight.requests
        slots, starts = plan.slots, plan.starts
        for request in islice(self._roster.decoding.values(), rows):
            position, left = request.computed, request.left
            if left and position < request.room:
                slots.append(request.slot)
                starts.append(position)
                requests.append(request)
                request.computed = position + 1
                request.left = left - 1
                request.in_flight += 1
        if len(self._roster.decoding) > rows:
            self._roster.rotate(rows)
        flight.decodes = len(requests)
        plan.counts = [1] * flight.decodes
        plan.samples = [1] * flight.decodes

    def _prefill(self, flight: Flight, budget: int) -> int:
        """Chunks of the prompts already begun, first admitted first. Returns what is left."""
        for request in list(self._roster.prefilling.values()):
            spare = self._blocks.available * self._block_size
            chunk = min(request.chunk(budget), request.room + spare - request.computed)
            if chunk > 0:
                missing = self._blocks.missing(request, request.computed + chunk)
                self._seats.grow(request, missing)
                if flight.prefill(request, chunk):
                    self._roster.decode(request)
                budget -= chunk
        return budget
