"""Order among requests: a guarded policy, and the waiting queue it orders."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from heapq import heapify, heappop, heappush

from asyncinfer.errors import PluginError
from asyncinfer.protocols.scheduling import SchedulingPolicy
from asyncinfer.scheduler.policy import FCFS
from asyncinfer.scheduler.request import Request

__all__ = ["Ranking", "WaitingQueue"]

Rank = tuple[tuple[float, ...], int]


class Ranking:
    """A policy's order, total by the request's id. A policy that raises, or whose rank is not a
    tuple of numbers, is replaced by first-come-first-served for good; `on_fault` is told once."""

    def __init__(
        self, policy: SchedulingPolicy, on_fault: Callable[[Exception], None] | None = None
    ) -> None:
        self.policy = policy
        #: Whether ranks never change with time.
        self.constant = getattr(policy, "constant", False) is True
        self.broken = False
        self._on_fault = on_fault

    def rank(self, request: Request, now: float) -> Rank:
        """Sort key: the smallest goes first."""
        try:
            key = self.policy.rank(request, now)
            if not isinstance(key, tuple) or any(math.isnan(part) for part in key):
                raise TypeError(f"rank {key!r} is not a tuple of numbers")
        except Exception as error:
            self._replace(error)
            key = (request.arrival,)
        return key, request.id

    def _replace(self, error: Exception) -> None:
        assert not self.broken, "first-come-first-served failed"
        culprit, self.broken = type(self.policy).__qualname__, True
        self.policy = FCFS()
        self.constant = True
        if self._on_fault is not None:
            fault = PluginError(
                f"scheduling policy {culprit}: rank() gave no usable answer: {error!r}; "
                "first-come-first-served takes over"
            )
            fault.__cause__ = error
            self._on_fault(fault)


class WaitingQueue:
    """Waiting requests, best rank first: a heap whose removals are lazy.

    A rank is taken when a request enters. Unless the policy's ranks are constant, all of them are
    taken again when the queue is consulted `REFRESH` seconds later; O(log n) in between.
    """

    REFRESH = 0.25

    def __init__(self, ranking: Ranking) -> None:
        self._ranking = ranking
        self._heap: list[tuple[Rank, Request]] = []
        self._size = 0
        self._ranked_at = -math.inf
        self._broken = ranking.broken

    def __len__(self) -> int:
        return self._size

    @property
    def entries(self) -> int:
        """Heap entries, those of removed requests included: bounded by twice the length."""
        return len(self._heap)

    def __iter__(self) -> Iterator[Request]:
        return (entry[1] for entry in self._heap if entry[1].entry is entry)

    def push(self, request: Request, now: float) -> None:
        assert request.entry is None, "queued twice"
        # Ids are unique, so that two entries never compare their requests.
        entry = (self._ranking.rank(request, now), request)
        request.entry = entry
        heappush(self._heap, entry)
        self._size += 1

    def remove(self, request: Request) -> None:
        assert request.entry is not None, "not queued"
        request.entry = None
        self._size -= 1
        if len(self._heap) > 2 * self._size + 64:
            self._heap = list(filter(_queued, self._heap))
            heapify(self._heap)

    def peek(self, now: float) -> Request | None:
        """The request to admit next; it stays queued."""
        due = not self._ranking.constant and now >= self._ranked_at + self.REFRESH
        if due or self._broken is not self._ranking.broken:
            self._rerank(now)
        heap = self._heap
        while heap and not _queued(heap[0]):
            heappop(heap)
        return heap[0][1] if heap else None

    def _rerank(self, now: float) -> None:
        requests, rank = list(self), self._ranking.rank
        self._heap = [(rank(request, now), request) for request in requests]
        if self._broken is not self._ranking.broken:
            # The policy broke, perhaps on the way: its ranks do not compare with FCFS's.
            self._broken = self._ranking.broken
            self._heap = [(rank(request, now), request) for request in requests]
        for entry in self._heap:
            entry[1].entry = entry
        heapify(self._heap)
        self._ranked_at = now


def _queued(entry: tuple[Rank, Request]) -> bool:
    return entry[1].entry is entry
