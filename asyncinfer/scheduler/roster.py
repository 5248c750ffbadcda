"""`Roster`: where every live request is, and the ways from one place to another."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import chain, islice

from asyncinfer.cache.page_group import PageGroup
from asyncinfer.cache.prefix_cache import PrefixCache
from asyncinfer.scheduler.counters import Counters
from asyncinfer.scheduler.following import Following
from asyncinfer.scheduler.plan import RunnerSpec
from asyncinfer.scheduler.queue import Ranking, WaitingQueue
from asyncinfer.scheduler.request import Request, RequestState
from asyncinfer.scheduler.seats import Seats

__all__ = ["Roster"]

_NEW, WAITING, RUNNING, PAUSED, LEAVING, FINISHED = RequestState


class Roster:
    """Live requests, each in exactly one collection, and the seats of those on the runner.

    WAITING   queue, or following    owns nothing
    RUNNING   prefilling or decoding owns a slot and blocks
    PAUSED    paused                 owns them until somebody needs them
    LEAVING   leaving                preempted; a step in flight still uses what it owns
    FINISHED  leaving, or nowhere    as LEAVING, or owns nothing
    """

    def __init__(
        self,
        spec: RunnerSpec,
        cache: PrefixCache | None,
        ranking: Ranking,
        counters: Counters,
        on_preempt: Callable[[Request], None] | None = None,
    ) -> None:
        self._counters = counters
        self._on_preempt = on_preempt
        self.seats = Seats(spec, cache)
        self.ranking = ranking
        # The dicts are by id, in order of entry, or of the last turn.
        self.queue = WaitingQueue(ranking)
        self.following = Following(spec.block_size)
        self.prefilling: dict[int, Request] = {}
        self.decoding: dict[int, Request] = {}
        self.paused: dict[int, Request] = {}
        self.leaving: dict[int, Request] = {}
        #: Monotonic seconds, as last told.
        self.now = 0.0

    def __bool__(self) -> bool:
        """Whether anything is runnable."""
        return bool(
            self.decoding
            or self.prefilling
            or self.queue
            or self.following.requests
            or self.leaving
        )

    def running(self) -> Iterator[Request]:
        return chain(self.decoding.values(), self.prefilling.values())

    @property
    def running_count(self) -> int:
        return len(self.decoding) + len(self.prefilling)

    def sleeping(self) -> Iterator[Request]:
        """Paused requests that have a seat."""
        return (request for request in self.paused.values() if request.slot >= 0)

    @property
    def sleeping_count(self) -> int:
        seated = len(self.seats.tenants) - len(self.seats.free)
        return seated - self.running_count - len(self.leaving)

    def ranked(self, requests: Iterable[Request]) -> list[Request]:
        """Best rank first."""
        return sorted(requests, key=lambda request: self.ranking.rank(request, self.now))

    def leaving_for(self, state: RequestState) -> int:
        """How many requests are on their way off the batch to WAITING or PAUSED."""
        return sum(r.state is LEAVING and r.after is state for r in self.leaving.values())

    def incoming(self) -> list[int]:
        """Pages of each KV group that come free when the steps in flight are committed: of those
        who leave, and behind those who go on."""
        moving = [request for request in self.running() if request.in_flight]
        return [
            self._incoming(index, group, moving if index else [])
            for index, group in enumerate(self.seats.blocks.groups)
        ]

    def _incoming(self, index: int, group: PageGroup, moving: Sequence[Request]) -> int:
        refs = group.pool.refs
        gone = (page for r in self.leaving.values() for page in r.tables[index].live)
        behind = (
            page
            for r in moving
            for page in r.tables[index].pages[
                r.tables[index].first_live_page : group.first(r.computed)
            ]
        )
        return sum(refs[page] == 1 for page in chain(gone, behind))

    def expected(self) -> int:
        """Blocks that can be allocated, with a page in every KV group, once the steps in flight are
        committed."""
        groups = self.seats.blocks.groups
        pages = zip(groups, self.incoming(), strict=True)
        return min(group.available + incoming for group, incoming in pages)

    def trim(self) -> None:
        """Give back every page that nobody needs any more; most are given back when a block is
        full."""
        for request in chain(self.running(), self.sleeping()):
            self.seats.blocks.trim(request, request.committed)

    # -- what others ask for -------------------------------------------------------------------

    def wait(self, request: Request) -> None:
        """A request that is nowhere enters the queue."""
        request.state = WAITING
        self.queue.push(request, self.now)

    def run(self, request: Request) -> None:
        """A request that is nowhere but has a seat joins the batch."""
        request.state = RUNNING
        # Until the first token of the answer it prefills, be it one token.
        decodes = request.known - request.computed == 1 and request.known > request.prompt_len
        (self.decoding if decodes else self.prefilling)[request.id] = request
        self.following.lead(request)

    def decode(self, request: Request) -> None:
        """What is known of it is computed or in flight: from now on it decodes."""
        if self.prefilling.pop(request.id, None) is not None:
            self.decoding[request.id] = request

    def rotate(self, count: int) -> None:
        """The first `count` decoding requests had their turn: they go behind the others."""
        for id in list(islice(self.decoding, count)):
            self.decoding[id] = self.decoding.pop(id)

    def follow(self, request: Request, leader: Request, tokens: int) -> None:
        """A queued request waits until the leader has committed so many tokens."""
        self.queue.remove(request)
        self.following.follow(request, leader, tokens)

    def advance(self, leader: Request) -> None:
        """The leader committed tokens: some may follow it no longer."""
        self.following.lead(leader)
        self._requeue(self.following.advance(leader))

    def pause(self, request: Request) -> None:
        if request.state is LEAVING:
            request.after = PAUSED
            self._requeue(self.following.dissolve(request))
        elif request.state in (WAITING, RUNNING):
            self._remove(request)
            self._park(request)

    def resume(self, request: Request) -> None:
        if request.state is LEAVING:
            request.after = WAITING
        elif request.state is PAUSED:
            self._remove(request)
            if request.slot < 0:
                self.wait(request)
            else:
                self.run(request)

    def finish(self, request: Request) -> None:
        if request.state is FINISHED:
            return
        self._remove(request)
        request.state = FINISHED
        if request.in_flight:
            self.leaving[request.id] = request
        elif request.slot >= 0:
            self.seats.vacate(request)

    def preempt(self, request: Request) -> None:
        """Take slot and blocks from a running or paused request; it will be computed again."""
        self._counters.preemptions += 1
        request.preemptions += 1
        request.view = None
        if self._on_preempt is not None:
            self._on_preempt(request)
        request.after = PAUSED if request.state is PAUSED else WAITING
        self._remove(request)
        request.state = LEAVING
        self.leaving[request.id] = request
        if not request.in_flight:
            self.settle(request)

    def settle(self, request: Request) -> None:
        """No step in flight uses a leaving request any more."""
        del self.leaving[request.id]
        self.seats.vacate(request)
        if request.state is LEAVING:
            if request.after is PAUSED:
                self._park(request)
            else:
                self.wait(request)

    # -- inside --------------------------------------------------------------------------------

    def _park(self, request: Request) -> None:
        request.state = PAUSED
        self.paused[request.id] = request

    def _remove(self, request: Request) -> None:
        """Take a live request out of where it is; those that follow it go back to the queue."""
        state = request.state
        if state is RUNNING:
            if self.decoding.pop(request.id, None) is None:
                del self.prefilling[request.id]
        elif state is PAUSED:
            del self.paused[request.id]
        elif state is LEAVING:
            del self.leaving[request.id]
        elif request.following is not None:
            self.following.leave(request)
        else:
            self.queue.remove(request)
        self._requeue(self.following.dissolve(request))

    def _requeue(self, followers: Iterable[Request]) -> None:
        for follower in followers:
            self.wait(follower)
