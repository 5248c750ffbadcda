"""Order among sequences: a guarded policy, and the waiting queue it orders."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import suppress
from heapq import heapify, heappop, heappush
from typing import Final

from asyncinfer.plugins.supervision import Limits, PluginFault, Supervisor, read_attribute
from asyncinfer.protocols.scheduling import MOST_NUMBERS, RequestView, SchedulingPolicy
from asyncinfer.scheduler.policy import FCFS, POLICIES
from asyncinfer.scheduler.sequence import Sequence

__all__ = ["Ranking", "WaitingQueue"]

Rank = tuple[tuple[float, ...], int]

#: One step may rank every waiting sequence, so that a call has to be short. The debt forgives calls
#: that a busy machine now and then holds up.
LIMITS: Final = Limits(seconds=0.0001, debt=1.0, raised=1)


class Ranking:
    """A policy's order, made total by the sequence's id. A policy that raises, takes too long
    (`LIMITS`) or gives no tuple of numbers is replaced by first-come-first-served for good, and
    `on_fault` is told once.

    Args:
        policy: not trusted, unless it is a shipped one.
        on_fault: told of the fault, a `PluginError`.
        clock: monotonic seconds; without one, nothing is too slow.
        label: what messages call the policy.
    """

    def __init__(
        self,
        policy: SchedulingPolicy,
        on_fault: Callable[[Exception], None] | None = None,
        clock: Callable[[], float] | None = None,
        label: str | None = None,
    ) -> None:
        label = label or f"scheduling policy {type(policy).__qualname__}"
        self.policy = policy
        self._on_fault = on_fault
        self._faults: list[Exception] = []
        #: Whether ranks never change with time.
        self.constant = read_attribute(policy, "constant", False, label) is True
        #: Whether the policy was replaced.
        self.broken = False
        #: None for a shipped policy, which is trusted.
        self._supervisor: Supervisor | None = None
        if type(policy) not in POLICIES.values():
            self._supervisor = Supervisor(
                label,
                LIMITS,
                consequence="first-come-first-served takes over",
                report=self._faults.append,
                clock=clock,
            )

    def rank(self, sequence: Sequence, now: float) -> Rank:
        """Sort key: the smallest goes first."""
        view = sequence.view
        if view is None or view.preemptions != sequence.preemptions:
            view = sequence.view = RequestView(
                sequence.id,
                sequence.priority,
                sequence.arrival,
                sequence.deadline,
                sequence.prompt_len,
                sequence.preemptions,
            )
        supervisor, key = self._supervisor, None
        if supervisor is not None:
            with suppress(PluginFault):
                key = supervisor.call(self.policy, "rank", view, now, check=_checked)
            if supervisor.retired is not None:
                self.policy, self._supervisor = FCFS(), None
                self.constant = self.broken = True
                key = None
                # Told last, for it may raise.
                if self._on_fault is not None:
                    self._on_fault(self._faults.pop(0))
                self._faults.clear()
        return self.policy.rank(view, now) if key is None else key, sequence.id


def _checked(key: object) -> tuple[float, ...]:
    """The rank as plain floats, so that no method of a plugin's is called to compare them."""
    if not isinstance(key, tuple) or len(key) > MOST_NUMBERS:
        raise TypeError(f"rank {key!r} is not a tuple of up to {MOST_NUMBERS} numbers")
    numbers = tuple([part if type(part) in (float, int) else float(part) for part in key])
    if any(map(math.isnan, numbers)):
        raise ValueError(f"rank {key!r} has no order: a part of it is NaN")
    return numbers


class _Place:
    """Where a sequence stands in the queue. It is emptied when the sequence is removed, so that the
    heap keeps no prompt alive."""

    __slots__ = ("sequence",)

    def __init__(self, sequence: Sequence) -> None:
        self.sequence: Sequence | None = sequence

    def __lt__(self, other: object) -> bool:
        # Only two places of one sequence have the same rank, and one of them is empty.
        return False


class WaitingQueue:
    """Waiting sequences, best rank first: a heap whose removals are lazy.

    A rank is taken when a sequence enters. Unless the policy's ranks are constant, all of them are
    taken again when the queue is consulted `REFRESH` seconds later; O(log n) in between.
    """

    REFRESH = 0.25

    def __init__(self, ranking: Ranking) -> None:
        self._ranking = ranking
        self._heap: list[tuple[Rank, _Place]] = []
        #: How many sequences wait.
        self.size = 0
        self._ranked_at = -math.inf
        self._broken = ranking.broken

    def __len__(self) -> int:
        return self.size

    @property
    def entries(self) -> int:
        """Heap entries, those of removed sequences included: bounded by twice `size`."""
        return len(self._heap)

    def __iter__(self) -> Iterator[Sequence]:
        return (place.sequence for _, place in self._heap if place.sequence is not None)

    def push(self, sequence: Sequence, now: float) -> None:
        assert sequence.place is None, "queued twice"
        place = sequence.place = _Place(sequence)
        heappush(self._heap, (self._ranking.rank(sequence, now), place))
        self.size += 1

    def remove(self, sequence: Sequence) -> None:
        place, sequence.place = sequence.place, None
        assert isinstance(place, _Place), "not queued"
        place.sequence = None
        self.size -= 1
        if len(self._heap) > 2 * self.size + 64:
            self._heap = [entry for entry in self._heap if entry[1].sequence is not None]
            heapify(self._heap)

    def peek(self, now: float) -> Sequence | None:
        """The sequence to admit next; it stays queued."""
        due = not self._ranking.constant and now >= self._ranked_at + self.REFRESH
        if due or self._broken is not self._ranking.broken:
            self._rerank(now)
        heap = self._heap
        while heap and heap[0][1].sequence is None:
            heappop(heap)
        return heap[0][1].sequence if heap else None

    def _rerank(self, now: float) -> None:
        sequences, rank = list(self), self._ranking.rank
        ranks = [rank(sequence, now) for sequence in sequences]
        if self._broken is not self._ranking.broken:
            # The policy was replaced, perhaps just now: its ranks do not compare with FCFS's.
            self._broken = self._ranking.broken
            ranks = [rank(sequence, now) for sequence in sequences]
        places = [_Place(sequence) for sequence in sequences]
        for sequence, place in zip(sequences, places, strict=True):
            sequence.place = place
        self._heap = list(zip(ranks, places, strict=True))
        heapify(self._heap)
        self._ranked_at = now
