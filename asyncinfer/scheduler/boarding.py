"""`Boarding`: which waiting requests join a step."""

from __future__ import annotations

from collections.abc import Sequence

from asyncinfer.cache.prefix_cache import CacheEntry
from asyncinfer.scheduler.counters import Counters
from asyncinfer.scheduler.flight import Flight
from asyncinfer.scheduler.request import Request, RequestState
from asyncinfer.scheduler.roster import Roster

__all__ = ["Boarding"]


class Boarding:
    """Admits requests to a step that has room left, with a slot, blocks and window pages."""

    def __init__(self, block_size: int, roster: Roster, counters: Counters) -> None:
        self._block_size = block_size
        self._roster = roster
        self._counters = counters
        self._seats = roster.seats
        self._blocks = roster.seats.blocks
        self._windows = roster.seats.blocks.windows
        #: The head of the queue that did not fit, how many blocks and window pages there were, how
        #: many ran.
        self._stuck = (-1, 0, 0, 0)

    def admit(self, flight: Flight, budget: int) -> None:
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
                    self._counters.shared += 1
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
        return 1 + self._blocks.missing(request, request.known)

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
        needed = self._blocks.missing(request, len(request.tokens)) - given + margin
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
            self._counters.forks += 1
        else:
            self._seats.seat(request, entries)
            if not request.preemptions:
                request.cached_tokens = request.computed
                if not request.index:
                    self._counters.prompt_tokens += request.prompt_len
                    self._counters.cached_tokens += request.computed
        chunk = request.chunk(budget)
        if self._windows is not None:
            spare = self._windows.available * self._block_size
            chunk = min(chunk, request.room + spare - request.computed)
        self._blocks.grow(request, self._blocks.missing(request, request.computed + chunk))
        plan.joins.append(self._seats.join(request))
        roster.run(request)
        if flight.prefill(request, chunk):
            roster.decode(request)
        return chunk
