"""`Boarding`: which waiting requests join a step."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from operator import add, le

from asyncinfer.cache.prefix_cache import CacheEntry
from asyncinfer.scheduler.counters import Counters
from asyncinfer.scheduler.flight import Flight
from asyncinfer.scheduler.request import Request, RequestState
from asyncinfer.scheduler.roster import Roster

__all__ = ["Boarding"]


class Boarding:
    """Admits requests to a step that has room left, with a slot and pages in every KV group."""

    def __init__(self, block_size: int, roster: Roster, counters: Counters) -> None:
        self._block_size = block_size
        self._roster = roster
        self._counters = counters
        self._seats = roster.seats
        self._blocks = roster.seats.blocks
        #: The head of the queue that did not fit, how many pages each group had, how many ran.
        self._stuck: tuple[int, list[int], int] = (-1, [], 0)

    def admit(self, flight: Flight, budget: int) -> None:
        """Admit waiting requests, the best-ranked first, while budget, slots and blocks last.
        One that does not fit holds up those behind it, or it might wait for ever; one that waits
        for a prefix that another is computing steps aside."""
        roster = self._roster
        margins: list[int] = []
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
                    self._counters.shared += 1
                    roster.follow(request, *ahead)
                    continue
            margins = margins or self._margins(roster.running())
            if not self._fit(request, entries, margins):
                stuck, most, _ = self._stuck
                pages = self._available()
                if request.id == stuck:
                    # Those beside the blocks come and go as others go on; the most there were did
                    # not do.
                    pages[1:] = map(max, pages[1:], most[1:])
                self._stuck = (request.id, pages, roster.running_count)
                return
            if request.fork_of is not None and request.fork_of.slot < 0:
                # It slept, and was preempted to make room.
                continue
            budget -= self._seat(flight, request, entries, budget)
            margins = list(map(add, margins, self._margins((request,))))

    def _hopeless(self, request: Request) -> bool:
        """Whether nothing has changed for the better since the request did not fit. Spares the
        look-up of a long prompt's blocks in every step."""
        roster = self._roster
        if not self._seats.free and not roster.sleeping_count:
            return True
        running = roster.running_count
        if not running and not roster.leaving:
            return False
        stuck, pages, ran = self._stuck
        return request.id == stuck and running >= ran and all(map(le, self._available(), pages))

    def _available(self) -> list[int]:
        """Pages of each group that can be had."""
        return [group.available for group in self._blocks.groups]

    def _margins(self, requests: Iterable[Request]) -> list[int]:
        """Pages of each group to leave to running requests: what their prompts still need and one
        more, so that a newcomer is not preempted at once by those it joins. None needs more at once
        than it holds when it decodes."""
        needs = [(1 + self._blocks.missing(r, r.known), r.tables) for r in requests]
        return [
            sum(min(need, max(1, group.steady - tables[g].held)) for need, tables in needs)
            for g, group in enumerate(self._blocks.groups)
        ]

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

    def _fit(self, request: Request, entries: Sequence[CacheEntry], margins: Sequence[int]) -> bool:
        """Whether there is a slot, and in every group pages for everything known of the request
        beside the margin; preempts paused requests if that is what it takes."""
        roster = self._roster
        shared = 0 if request.fork_of is None else request.prompt_len - 1
        while True:
            wanted = self._blocks.wanted(len(request.tokens), entries, shared)
            lacking = [
                want + margin - free
                for want, margin, free in zip(wanted, margins, self._available(), strict=True)
            ]
            if max(lacking) <= 0 and self._seats.free:
                return True
            if not roster.sleeping_count:
                return False
            coming = all(map(le, lacking, roster.incoming()))
            if coming and (self._seats.free or roster.leaving):
                return False
            roster.preempt(roster.ranked(roster.sleeping())[-1])

    def _seat(
        self, flight: Flight, request: Request, entries: Sequence[CacheEntry], budget: int
    ) -> int:
        """Admit the request with its first chunk; returns how many tokens that is."""
        roster = self._roster
        roster.queue.remove(request)
        if request.fork_of is not None:
            self._seats.seat_fork(request, request.fork_of)
            request.fork_of = None
            self._counters.forks += 1
        else:
            self._seats.seat(request, entries)
            if not request.preemptions:
                request.cached_tokens = request.computed
                if not request.index:
                    self._counters.prompt_tokens += request.prompt_len
                    self._counters.cached_tokens += request.computed
        spare = self._blocks.available * self._block_size
        chunk = min(request.chunk(budget), request.room + spare - request.computed)
        self._blocks.grow(request, self._blocks.missing(request, request.computed + chunk))
        flight.plan.joins.append(self._seats.join(request))
        roster.run(request)
        if flight.prefill(request, chunk):
            roster.decode(request)
        return chunk
