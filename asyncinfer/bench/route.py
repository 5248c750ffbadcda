"""`asyncinfer bench route`: a trace on routed replicas, in virtual time."""

from __future__ import annotations

import sys
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from heapq import heappop, heappush
from itertools import count
from typing import Final

from asyncinfer.bench.cache_trace import TraceRow
from asyncinfer.bench.record import BenchError, Figure
from asyncinfer.plugins import cache_policies
from asyncinfer.remote import ROUTINGS, Route, Router, Routing, ToldPolicy
from asyncinfer.testing import CacheHarness, CacheRequest

__all__ = ["RouteOptions", "RouteResult", "RouteRun", "measure_route"]

#: The share of one replica's throughput that two replicas must reach together.
TARGET: Final = 1.8


@dataclass(frozen=True, slots=True, kw_only=True)
class RouteOptions:
    """Options of the benchmark."""

    #: The trace's name in records.
    trace: str = ""
    replicas: int = 2
    #: Blocks of each replica's cache.
    blocks: int = 3_000
    #: Seconds that a replica takes to compute a block of a prompt, and for an answer, beside which
    #: other prompts are computed.
    block_seconds: float = 0.05
    answer_seconds: float = 1.0
    #: How many times as fast as in the trace requests come, so that replicas are never idle.
    speed: float = 20.0


@dataclass(frozen=True, slots=True)
class RouteRun:
    """The trace on some replicas."""

    replicas: int
    routing: Routing
    #: Blocks found in the caches, and all blocks.
    hits: int
    total: int
    #: Seconds until the last answer, and the mean seconds from a request to its first token.
    seconds: float
    ttft: float
    #: Requests at each replica.
    requests: tuple[int, ...]

    @property
    def rate(self) -> float:
        return self.hits / self.total


@dataclass(frozen=True, slots=True)
class RouteResult:
    """One replica, and several by each routing."""

    one: RouteRun
    several: tuple[RouteRun, ...]

    def figures(self) -> tuple[Figure, ...]:
        found = [Figure("hit rate, one replica", self.one.rate, "", "higher")]
        for run in self.several:
            where = f"{run.replicas} replicas, {run.routing}"
            gain = self.one.seconds / run.seconds
            target = TARGET if (run.replicas, run.routing) == (2, "prefix") else None
            found += [
                Figure(f"hit rate, {where}", run.rate, "", "higher"),
                Figure(f"throughput in that of one, {where}", gain, "x", "higher", target),
                Figure(f"time to first token, {where}", run.ttft, "s", "lower"),
            ]
        return tuple(found)


def measure_route(rows: Sequence[TraceRow], options: RouteOptions) -> RouteResult:
    """Replay the trace on one replica, and on several by each routing. Raises `BenchError`."""
    longest = max(len(row.ids) for row in rows)
    if longest > options.blocks:
        raise BenchError(f"a request has {longest} blocks, more than {options.blocks}")
    one = _replay(rows, options, 1, "prefix")
    several = tuple(_replay(rows, options, options.replicas, way) for way in ROUTINGS)
    return RouteResult(one, several)


class _Server:
    """A replica in virtual time: it computes prompts one after the other, in the order of their
    arrival, and answers beside them."""

    def __init__(self, blocks: int) -> None:
        self.told = ToldPolicy(cache_policies.resolve("lru"))
        self.cache = CacheHarness(blocks, self.told, block_size=1)
        #: Requests whose prompts wait, with their arrival and their route.
        self.waiting: deque[tuple[float, CacheRequest, Route]] = deque()
        self.computing = False
        self.requests = 0


class _Replay:
    """A trace on replicas, event by event."""

    def __init__(self, options: RouteOptions, replicas: int, routing: Routing) -> None:
        self.options = options
        self.router = Router(routing)
        self.servers = {f"replica-{index}": _Server(options.blocks) for index in range(replicas)}
        for name in self.servers:
            self.router.joined(name, sys.maxsize)
        self.now = self.waited = 0.0
        self.hits = 0
        #: Events with their times; numbers order events at the same time.
        self._events: list[tuple[float, int, Callable[[], None]]] = []
        self._number = count()

    def run(self, rows: Sequence[TraceRow]) -> None:
        for row in rows:
            self._at(row.time / self.options.speed, partial(self._arrive, row))
        while self._events:
            self.now, _, happen = heappop(self._events)
            happen()

    def _at(self, time: float, happen: Callable[[], None]) -> None:
        heappush(self._events, (time, next(self._number), happen))

    def _arrive(self, row: TraceRow) -> None:
        # All caches have one secret, so any of them can compute the keys.
        request = next(iter(self.servers.values())).cache.request(row.ids)
        session = None if row.conversation is None else str(row.conversation)
        route = self.router.begin(request.keys, session)
        server = self.servers[route.replica]
        server.requests += 1
        server.waiting.append((self.now, request, route))
        if not server.computing:
            self._compute(server)

    def _compute(self, server: _Server) -> None:
        server.computing = bool(server.waiting)
        if not server.waiting:
            return
        came, request, route = server.waiting.popleft()
        found = server.cache.serve(request, self.now)
        self.hits += found
        took = (len(request.keys) - found) * self.options.block_seconds
        self._at(self.now + took, partial(self._computed, server, came, route))

    def _computed(self, server: _Server, came: float, route: Route) -> None:
        self.waited += self.now - came
        self.router.told(route.replica, server.told.changes())
        self.router.started(route)
        self._at(self.now + self.options.answer_seconds, partial(self.router.end, route))
        self._compute(server)


def _replay(
    rows: Sequence[TraceRow], options: RouteOptions, replicas: int, routing: Routing
) -> RouteRun:
    replay = _Replay(options, replicas, routing)
    replay.run(rows)
    return RouteRun(
        replicas=replicas,
        routing=routing,
        hits=replay.hits,
        total=sum(len(row.ids) for row in rows),
        seconds=replay.now,
        ttft=replay.waited / len(rows),
        requests=tuple(server.requests for server in replay.servers.values()),
    )
