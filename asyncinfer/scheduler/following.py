"""`Following`: requests that wait for a prefix somebody else is computing right now."""

from __future__ import annotations

from collections.abc import Sequence
from heapq import heappop, heappush
from itertools import count

from asyncinfer.scheduler.request import Request

__all__ = ["Following"]


class Following:
    """A request whose next prefix block is being computed by a running one (its leader) waits for
    it instead of computing it again, and so does an answer of `n` for its sibling's prompt.

    Nobody runs while it follows and only a running request leads a prefix, so there is no cycle;
    a leader that stops being computed, for whatever reason, releases its followers.
    """

    def __init__(self, block_size: int) -> None:
        self._block_size = block_size
        #: Followers by id.
        self.requests: dict[int, Request] = {}
        #: The next unpublished prompt block of each running request, by chain key: one entry per
        #: request. A follower's cached prefix ends exactly where its leader's next block begins.
        self._leaders: dict[bytes, Request] = {}
        self._leading: dict[int, bytes] = {}
        self._serial = count()

    @property
    def leaders(self) -> int:
        """How many requests lead a prefix."""
        return len(self._leading)

    def lead(self, request: Request) -> None:
        """A running request was admitted, went on, or had blocks published."""
        self._retire(request)
        j = request.published
        full = len(request.tokens) // self._block_size
        if request.node is not None and j < min(full, len(request.keys)):
            key = request.keys[j]
            if self._leaders.setdefault(key, request) is request:
                self._leading[request.id] = key

    def ahead(self, request: Request, matched: int, limit: int) -> tuple[Request, int] | None:
        """Who is computing the block after the `matched` cached ones, and how many tokens of it
        (whole blocks, at most `limit`) the request can use; None if nobody is."""
        blocks = limit // self._block_size
        if matched >= min(blocks, len(request.keys)):
            return None
        leader = self._leaders.get(request.keys[matched])
        if leader is None:
            return None
        common = min(_common(leader.keys, request.keys), blocks) * self._block_size
        return (leader, common) if common > leader.committed else None

    def follow(self, request: Request, leader: Request, tokens: int) -> None:
        """Let the request wait until the leader has committed so many tokens."""
        assert request.following is None
        request.following = leader
        self.requests[request.id] = request
        heappush(leader.followers, (tokens, next(self._serial), request))

    def leave(self, request: Request) -> None:
        """The request no longer waits for its leader."""
        # Its place in the leader's heap is skipped when it comes up.
        request.following = None
        del self.requests[request.id]

    def advance(self, leader: Request) -> list[Request]:
        """The leader committed tokens: those whose wait is over."""
        return self._release(leader, leader.committed)

    def dissolve(self, leader: Request) -> list[Request]:
        """The leader is off the batch: everyone who waited for it."""
        self._retire(leader)
        return self._release(leader, None)

    def _release(self, leader: Request, committed: int | None) -> list[Request]:
        heap, released = leader.followers, []
        while heap and (committed is None or heap[0][0] <= committed):
            request = heappop(heap)[2]
            if request.following is leader:
                self.leave(request)
                released.append(request)
        return released

    def _retire(self, request: Request) -> None:
        key = self._leading.pop(request.id, None)
        if key is not None:
            del self._leaders[key]


def _common(a: Sequence[bytes], b: Sequence[bytes]) -> int:
    """How many leading chain keys are equal. Equal keys mean equal prefixes: bisection."""
    low, high = 0, min(len(a), len(b))
    while low < high:
        middle = (low + high + 1) // 2
        if a[middle - 1] == b[middle - 1]:
            low = middle
        else:
            high = middle - 1
    return low
