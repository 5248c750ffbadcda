"""`InflightPrefixes`: prefixes that are being computed, and the sequences that wait for them."""

from __future__ import annotations

from collections import abc
from heapq import heappop, heappush
from itertools import count

from asyncinfer.scheduler.sequence import Sequence

__all__ = ["InflightPrefixes"]


class InflightPrefixes:
    """Where a running sequence (the leader) computes the next prefix block of another one (the
    follower), the follower waits instead of computing it again. So does an answer of `n` for its
    sibling's prompt.

    No follower runs and only a running sequence leads, so there is no cycle. A leader that stops
    being computed, for whatever reason, releases its followers.
    """

    def __init__(self, block_size: int) -> None:
        self._block_size = block_size
        #: By id.
        self.followers: dict[int, Sequence] = {}
        #: The next unpublished prompt block of each running sequence, by chain key: one entry per
        #: sequence. A follower's cached prefix ends exactly where its leader's next block begins.
        self._leaders: dict[bytes, Sequence] = {}
        self._leading: dict[int, bytes] = {}
        self._serial = count()

    @property
    def leaders(self) -> int:
        """How many sequences lead a prefix."""
        return len(self._leading)

    def lead(self, sequence: Sequence) -> None:
        """Note the block that a running sequence computes next; called when it is admitted, goes on
        after a pause, or had blocks published."""
        self._retire(sequence)
        j = sequence.published
        full = len(sequence.tokens) // self._block_size
        if sequence.node is not None and j < min(full, len(sequence.keys)):
            key = sequence.keys[j]
            if self._leaders.setdefault(key, sequence) is sequence:
                self._leading[sequence.id] = key

    def ahead(self, sequence: Sequence, matched: int, limit: int) -> tuple[Sequence, int] | None:
        """Which sequence computes the block after the `matched` cached ones, and how many of its
        tokens (whole blocks, at most `limit`) the sequence can use; None if nobody is."""
        blocks = limit // self._block_size
        if matched >= min(blocks, len(sequence.keys)):
            return None
        leader = self._leaders.get(sequence.keys[matched])
        if leader is None:
            return None
        common = min(_common(leader.keys, sequence.keys), blocks) * self._block_size
        return (leader, common) if common > leader.committed else None

    def follow(self, sequence: Sequence, leader: Sequence, tokens: int) -> None:
        """Let the sequence wait until the leader has committed so many tokens."""
        assert sequence.following is None
        sequence.following = leader
        self.followers[sequence.id] = sequence
        heappush(leader.followers, (tokens, next(self._serial), sequence))

    def leave(self, sequence: Sequence) -> None:
        """The sequence no longer waits for its leader."""
        # `_release` skips what is left of it in the leader's heap.
        sequence.following = None
        del self.followers[sequence.id]

    def advance(self, leader: Sequence) -> list[Sequence]:
        """The leader committed tokens. Gives the followers whose wait is over."""
        return self._release(leader, leader.committed)

    def dissolve(self, leader: Sequence) -> list[Sequence]:
        """The leader is off the batch. Gives all of its followers."""
        self._retire(leader)
        return self._release(leader, None)

    def _release(self, leader: Sequence, committed: int | None) -> list[Sequence]:
        heap, released = leader.followers, []
        while heap and (committed is None or heap[0][0] <= committed):
            sequence = heappop(heap)[2]
            if sequence.following is leader:
                self.leave(sequence)
                released.append(sequence)
        return released

    def _retire(self, sequence: Sequence) -> None:
        key = self._leading.pop(sequence.id, None)
        if key is not None:
            del self._leaders[key]


def _common(a: abc.Sequence[bytes], b: abc.Sequence[bytes]) -> int:
    """How many leading chain keys are equal. Equal keys mean equal prefixes: bisection."""
    low, high = 0, min(len(a), len(b))
    while low < high:
        middle = (low + high + 1) // 2
        if a[middle - 1] == b[middle - 1]:
            low = middle
        else:
            high = middle - 1
    return low
