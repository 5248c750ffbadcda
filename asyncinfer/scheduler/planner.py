"""`Planner`: builds one step out of the requests on the roster."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import islice

from asyncinfer.cache.prefix_cache import CacheEntry
from asyncinfer.scheduler.plan import RunnerSpec, StepPlan
from asyncinfer.scheduler.request import Request, RequestState
from asyncinfer.scheduler.roster import Roster

__all__ = ["Flight", "Planner"]


@dataclass(slots=True)
class Flight:
    """A step from its plan to its commit."""

    plan: StepPlan
    #: Row -> request; rows below `decodes` are decode rows.
    requests: list[Request] = field(default_factory=list)
    decodes: int = 0
    #: Sources of the step's copies, which perhaps only the step itself still needs.
    pins: list[int] = field(default_factory=list)
    page_pins: list[int] = field(default_factory=list)


class Planner:
    """Decode rows first, then chunks of prompts already begun, then admission, all under one
    budget of query tokens."""

    def __init__(self, spec: RunnerSpec, roster: Roster) -> None:
        self._block_size = spec.block_size
        self._most_tokens = self._max_tokens = spec.max_step_tokens
        self._roster = roster
        self._seats = roster.seats
        self._blocks = roster.seats.blocks
        self._windows = roster.seats.blocks.windows
        #: The head of the queue that did not fit, how many blocks and window pages there were, how
        #: many ran.
        self._stuck = (-1, 0, 0, 0)
        #: Counters; see `Scheduler`.
        self.prompt_tokens = 0
        self.cached_tokens = 0
        self.forks = 0
        self.shared = 0

    def plan(self, step: int) -> Flight | None:
        """The next step; None if there is nothing to compute."""
        flight = Flight(StepPlan(step))
        self._secure()
        self._decode(flight)
        budget = self._prefill(flight, self._max_tokens - flight.decodes)
        self._admit(flight, budget)
        if not flight.requests:
            return None
        self._seats.flush(flight.plan)
        return flight

    # -- when the device has no room to compute a step -------------------------------------------

    def shrink(self, tokens: int) -> None:
        """A step of so many query tokens was too large: the next ones have half of them at most.
        Preempting would not help, for the blocks are allocated whether or not they are used."""
        self._max_tokens = max(1, tokens // 2)

    def recover(self) -> None:
        """A step was computed: the next may have a token more again."""
        self._max_tokens = min(self._most_tokens, self._max_tokens + 1)

    # -- blocks for those that run -------------------------------------------------------------

    def _secure(self) -> None:
        """See that every running request that is out of room gets a block, by preemption where
        there are none left. One whose block comes free only with a step in flight waits for it."""
        roster = self._roster
        decoding = islice(roster.decoding.values(), self._max_tokens)
        needy = [r for r in decoding if r.computed == r.room and r.left]
        if len(roster.decoding) < self._max_tokens:
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

    def _decode(self, flight: Flight) -> None:
        """One token of every decoding request. Runs for every token drawn: keep it lean."""
        plan, requests = flight.plan, flight.requests
        slots, starts = plan.slots, plan.starts
        for request in islice(self._roster.decoding.values(), self._max_tokens):
            position, left = request.computed, request.left
            if left and position < request.room:
                slots.append(request.slot)
                starts.append(position)
                requests.append(request)
                request.computed = position + 1
                request.left = left - 1
                request.in_flight += 1
        flight.decodes = len(requests)
        plan.counts = [1] * flight.decodes
        plan.samples = [1] * flight.decodes

    def _prefill(self, flight: Flight, budget: int) -> int:
        """Chunks of the prompts already begun, first admitted first. Returns what is left."""
        for request in list(self._roster.prefilling.values()):
            spare = self._blocks.available * self._block_size
            chunk = min(self._chunk(request, budget), request.room + spare - request.computed)
            if chunk > 0:
                missing = self._missing(request, request.computed + chunk)
                self._seats.grow(request, missing)
                self._row(flight, request, chunk)
                budget -= chunk
        return budget

    def _row(self, flight: Flight, request: Request, chunk: int) -> None:
        """A row of prompt tokens (or of answer tokens to be computed again), which draws after
        the last known token."""
        plan, start = flight.plan, request.computed
        request.computed = end = start + chunk
        if request.prompt_logprobs is not None and request.scored <= start < request.prompt_len - 1:
            plan.prompt_logprobs[len(flight.requests)] = request.prompt_logprobs
        draws = end == request.known
        plan.slots.append(request.slot)
        plan.starts.append(start)
        plan.counts.append(chunk)
        plan.samples.append(int(draws))
        flight.requests.append(request)
        request.in_flight += 1
        if draws:
            request.left -= 1
            if self._roster.prefilling.pop(request.id, None) is not None:
                self._roster.decoding[request.id] = request

    def _chunk(self, request: Request, budget: int) -> int:
        """Tokens to compute next. A row never straddles the last prompt token whose logprob was
        given before a preemption, so that none is given twice."""
        end = request.known
        if request.prompt_logprobs is not None and request.computed < request.scored:
            end = request.scored
        return min(end - request.computed, budget)

    def _missing(self, request: Request, tokens: int) -> int:
        """Blocks the table lacks for so many tokens."""
        return max(0, -(-tokens // self._block_size) - len(request.blocks))

    # -- admission -----------------------------------------------------------------------------

    def _admit(self, flight: Flight, budget: int) -> None:
        """Admit waiting requests, the best-ranked first, while budget, slots and blocks last.
        One that does not fit holds up those behind it, or it might wait for ever; one that waits
        for a prefix that another is computing steps aside."""
        roster = self._roster
        margin, page_margin = -1, 0
        while budget > 0 and (request := roster.queue.peek(roster.now)) is not None:
            if self._hopeless(request):
                return
            if request.fork_of is not None and (wait := self._fork_wait(request)) is not None:
                roster.follow(request, *wait)
                continue
            entries: list[CacheEntry] = []
            if request.fork_of is None:
                reusable = self._reusable(request)
                entries = self._blocks.match(request, reusable)
                ahead = roster.following.ahead(request, len(entries), reusable)
                if ahead is not None:
                    self.shared += 1
                    roster.follow(request, *ahead)
                    continue
            if margin < 0:
                margin = sum(map(self._margin, roster.running()))
                page_margin = sum(map(self._page_margin, roster.running()))
            if not self._fit(request, entries, margin, page_margin):
                blocks, pages = self._allocatable()
                if request.id == self._stuck[0]:
                    # Pages come and go with every block; the most there were did not do.
                    pages = max(pages, self._stuck[2])
                self._stuck = (request.id, blocks, pages, roster.running_count)
                return
            if request.fork_of is not None and request.fork_of.slot < 0:
                # It slept, and was preempted to make room.
                continue
            budget -= self._seat(flight, request, entries, budget)
            margin += self._margin(request)
            page_margin += self._page_margin(request)

    def _hopeless(self, request: Request) -> bool:
        """Whether nothing has changed for the better since the request did not fit. Spares the
        look-up of a long prompt's blocks in every step."""
        roster = self._roster
        if not self._seats.free and not roster.sleeping_count:
            return True
        running = roster.running_count
        if not running and not roster.leaving:
            return False
        stuck, blocks, pages, ran = self._stuck
        now_blocks, now_pages = self._allocatable()
        same = request.id == stuck and running >= ran
        return same and now_blocks <= blocks and now_pages <= pages

    def _allocatable(self) -> tuple[int, int]:
        """Blocks and window pages that can be had."""
        pages = 0 if self._windows is None else self._windows.available
        return self._blocks.allocatable, pages

    def _margin(self, request: Request) -> int:
        """Blocks to leave to a running request: what its prompt still needs and one more, so that
        a newcomer is not preempted at once by those it joins."""
        return 1 + self._missing(request, request.known)

    def _page_margin(self, request: Request) -> int:
        """The same in window pages, of which it needs no more at once than its window spans."""
        if self._windows is None:
            return 0
        held = len(request.pages) - request.passed
        return min(self._margin(request), max(1, self._windows.steady - held))

    def _pages_wanted(self, request: Request, entries: Sequence[CacheEntry]) -> int:
        """Available window pages that a request takes with it, those that `entries` bring
        included."""
        windows = self._windows
        if windows is None:
            return 0
        most = min(-(-len(request.tokens) // self._block_size), windows.steady)
        if request.fork_of is None:
            return most - len(windows.pages(entries)) + self._blocks.unused_pages(entries)
        shared = request.prompt_len - 1
        return most - (shared // self._block_size - windows.first(shared))

    def _fork_wait(self, request: Request) -> tuple[Request, int] | None:
        """Whom an answer of `n` has to wait for, and for how many tokens. None: it can go, alone
        if `fork_of` is None."""
        leader, shared = request.fork_of, request.prompt_len - 1
        assert leader is not None
        if leader.slot >= 0 and leader.committed >= shared:
            if not self._blocks.can_fork(leader, shared):
                # What it no longer sees is in the prefix cache, if anywhere.
                request.fork_of = None
            return None
        state = leader.after if leader.state is RequestState.LEAVING else leader.state
        if state in (RequestState.WAITING, RequestState.RUNNING):
            return leader, shared
        # It ended or sleeps: what it computed is in the prefix cache, if anywhere.
        request.fork_of = None
        return None

    def _reusable(self, request: Request) -> int:
        """Leading tokens that may come from the cache. At least one has to be computed, and all
        whose logprobs are still to be given."""
        limit = len(request.tokens) - 1
        if request.prompt_logprobs is not None and request.scored < request.prompt_len - 1:
            limit = min(limit, request.scored)
        return limit

    def _fit(
        self, request: Request, entries: Sequence[CacheEntry], margin: int, page_margin: int
    ) -> bool:
        """Whether there is a slot, blocks for everything known of the request beside the margin,
        and window pages; preempts paused requests if that is what it takes."""
        roster, blocks = self._roster, self._blocks
        if request.fork_of is None:
            given = len(entries)
        else:
            given = (request.prompt_len - 1) // self._block_size
        needed = self._missing(request, len(request.tokens)) - given + margin
        while True:
            free_blocks, free_pages = self._allocatable()
            lacking = needed + blocks.unused(entries) - free_blocks
            lacking_pages = self._pages_wanted(request, entries) + page_margin - free_pages
            if lacking <= 0 and lacking_pages <= 0 and self._seats.free:
                return True
            if not roster.sleeping_count:
                return False
            coming = lacking <= roster.incoming() and lacking_pages <= roster.incoming_pages()
            if coming and (self._seats.free or roster.leaving):
                return False
            roster.preempt(roster.ranked(roster.sleeping())[-1])

    def _seat(
        self, flight: Flight, request: Request, entries: Sequence[CacheEntry], budget: int
    ) -> int:
        """Admit the request with its first chunk; returns how many tokens that is."""
        roster, plan = self._roster, flight.plan
        roster.queue.remove(request)
        if request.fork_of is not None:
            copy = self._seats.seat_fork(request, request.fork_of)
            if copy is not None:
                plan.copies.append(copy)
                flight.pins.append(copy[0])
                if self._windows is not None:
                    pages = self._seats.copied_pages(request, request.fork_of)
                    plan.copied_pages.append(pages)
                    flight.page_pins.append(pages[0])
            request.fork_of = None
            self.forks += 1
        else:
            self._seats.seat(request, entries)
            if not request.preemptions:
                request.cached_tokens = request.computed
                if not request.index:
                    self.prompt_tokens += request.prompt_len
                    self.cached_tokens += request.computed
        chunk = self._chunk(request, budget)
        if self._windows is not None:
            spare = self._windows.available * self._block_size
            chunk = min(chunk, request.room + spare - request.computed)
        self._blocks.grow(request, self._missing(request, request.computed + chunk))
        plan.joins.append(self._seats.join(request))
        roster.run(request)
        self._row(flight, request, chunk)
        return chunk
