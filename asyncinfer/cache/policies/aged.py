"""`Aged`: blocks in the order of what they are worth at their age."""

from __future__ import annotations

from heapq import heappop, heappush
from typing import Final

from asyncinfer.cache.policies.lifetimes import AGES, Lifetimes, age_class, age_start

__all__ = ["Aged", "Kind"]

STARTS: Final = [age_start(age) for age in range(AGES)]


class Kind:
    """Blocks that are expected to behave alike."""

    def __init__(self, number: int) -> None:
        self.number = number
        self.lifetimes = Lifetimes()
        #: Age class -> blocks, with the time of their release.
        self.queues: list[dict[int, int]] = [{} for _ in range(AGES)]
        #: Age class -> its queue's place among all, worst first.
        self.places: list[int] = [0] * AGES
        #: Age class -> whether a time to look at its queue is in `_due`.
        self.timed: list[bool] = [False] * AGES


class Aged:
    """A set of blocks ranked by kind and time of release; lowest is the one whose kind and age
    have the least `density`. Blocks wait in one queue for each kind and age class, and move on as
    `time` passes. O(1) per block."""

    def __init__(self, kinds: list[Kind]) -> None:
        """`kinds[j].number` is `j`."""
        self.time = 0
        self._kinds = kinds
        self._queue: dict[int, dict[int, int]] = {}
        #: Place -> kind and age class.
        self._order: list[tuple[Kind, int]] = []
        #: Heap of the places of queues that hold something, or did.
        self._full: list[int] = []
        #: Heap of the times at which the first block of a queue may have outgrown it, with the
        #: queue's kind and age class.
        self._due: list[tuple[int, int, int]] = []
        self.sort()

    def __len__(self) -> int:
        return len(self._queue)

    def __contains__(self, block: int) -> bool:
        return block in self._queue

    def sort(self) -> None:
        """Take note of changed densities. Of equal ones, the older goes first."""
        places = [(kind, age) for kind in self._kinds for age in range(AGES)]
        places.sort(key=lambda place: (place[0].lifetimes.density[place[1]], -place[1]))
        for place, (kind, age) in enumerate(places):
            kind.places[age] = place
        self._order = places
        # A sorted list is a heap.
        self._full = [place for place, (kind, age) in enumerate(places) if kind.queues[age]]

    def put(self, block: int, rank: tuple[Kind, int]) -> None:
        kind, since = rank
        self.discard(block)
        age = age_class(self.time - since)
        queue = self._queue[block] = kind.queues[age]
        if not queue:
            heappush(self._full, kind.places[age])
        queue[block] = since
        if not kind.timed[age]:
            self._watch(kind, age, since)

    def discard(self, block: int) -> None:
        queue = self._queue.pop(block, None)
        if queue is not None:
            del queue[block]

    def pop(self) -> tuple[int, tuple[Kind, int]] | None:
        """Take out the lowest block, with its rank; None if there is none."""
        self._settle()
        while self._full:
            kind, age = self._order[self._full[0]]
            queue = kind.queues[age]
            if queue:
                block = next(iter(queue))
                since = queue[block]
                self.discard(block)
                return block, (kind, since)
            heappop(self._full)
        return None

    def _settle(self) -> None:
        """Move on the blocks that have outgrown their queues."""
        while self._due and self._due[0][0] <= self.time:
            _, number, age = heappop(self._due)
            kind = self._kinds[number]
            kind.timed[age] = False
            queue = kind.queues[age]
            while queue:
                block = next(iter(queue))
                since = queue[block]
                if self.time - since < STARTS[age + 1]:
                    self._watch(kind, age, since)
                    break
                self.put(block, (kind, since))

    def _watch(self, kind: Kind, age: int, since: int) -> None:
        if age + 1 < AGES:
            kind.timed[age] = True
            heappush(self._due, (since + STARTS[age + 1], kind.number, age))
