"""`Aged`: blocks in the order of what they are worth at their age."""

from __future__ import annotations

from typing import Final

from asyncinfer.cache.policies.lifetimes import AGES, Lifetimes, age_class, age_start

__all__ = ["Aged", "Kind"]

STARTS: Final = [age_start(age) for age in range(AGES)]


class Kind:
    """Blocks that are expected to behave alike."""

    def __init__(self) -> None:
        self.lifetimes = Lifetimes()
        #: Age class -> blocks, with the time of their release.
        self.queues: list[dict[int, int]] = [{} for _ in range(AGES)]


class Aged:
    """A set of blocks ranked by kind and time of release; lowest is the one whose kind and age
    have the least `density`. Blocks wait in one queue for each kind and age class and move on as
    `time` passes, a few queues at a call. O(1) per block."""

    def __init__(self, kinds: list[Kind]) -> None:
        self.time = 0
        self._kinds = kinds
        self._queue: dict[int, dict[int, int]] = {}
        #: Kinds and age classes, worst first.
        self._order: list[tuple[Kind, int]] = []
        self._turn = 0
        self.sort()

    def __len__(self) -> int:
        return len(self._queue)

    def __contains__(self, block: int) -> bool:
        return block in self._queue

    def sort(self) -> None:
        """Take note of changed densities."""
        places = [(kind, age) for kind in self._kinds for age in range(AGES)]
        # Equal ones: the older first.
        self._order = sorted(
            places, key=lambda place: (place[0].lifetimes.density[place[1]], -place[1])
        )

    def put(self, block: int, rank: tuple[Kind, int]) -> None:
        kind, since = rank
        self.discard(block)
        queue = self._queue[block] = kind.queues[age_class(self.time - since)]
        queue[block] = since

    def discard(self, block: int) -> None:
        queue = self._queue.pop(block, None)
        if queue is not None:
            del queue[block]

    def pop(self) -> tuple[int, tuple[Kind, int]] | None:
        """Take out the lowest block, with its rank; None if there is none."""
        self._turn = (self._turn + 1) % len(self._kinds)
        turn = self._kinds[self._turn]
        for age, queue in enumerate(turn.queues):
            if queue:
                self._settle(turn, age)
        for kind, age in self._order:
            queue = kind.queues[age]
            if queue:
                self._settle(kind, age)
                if queue:
                    block, since = next(iter(queue.items()))
                    self.discard(block)
                    return block, (kind, since)
        # All that were left have just moved on to classes before this one.
        return self.pop() if self._queue else None

    def _settle(self, kind: Kind, age: int) -> None:
        """Move on the blocks that have outgrown a queue."""
        queue = kind.queues[age]
        while queue and age + 1 < AGES:
            block, since = next(iter(queue.items()))
            if self.time - since < STARTS[age + 1]:
                return
            self.put(block, (kind, since))
