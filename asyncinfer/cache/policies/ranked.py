"""`Ranked`: blocks in the order of a rank; `LowestFirst`: policies that give up the lowest."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from heapq import heapify, heappop, heappush
from typing import Any

from asyncinfer.protocols.eviction import CachedBlock

__all__ = ["LowestFirst", "Ranked"]

#: Entries out of date below which the heap is never swept.
SLACK = 64


class Ranked:
    """A set of blocks, each with a rank; equal ranks keep the order they were put in.

    A heap whose entries are checked when they surface. Every call is O(log n) per block,
    amortised over the sweeps that keep the heap below twice the set.
    """

    def __init__(self) -> None:
        self._heap: list[tuple[Any, int, int]] = []
        #: Block -> the number of its entry; entries with other numbers are out of date.
        self._entry: dict[int, int] = {}
        self._count = 0

    def __len__(self) -> int:
        return len(self._entry)

    def __contains__(self, block: int) -> bool:
        return block in self._entry

    def put(self, block: int, rank: Any) -> None:
        """Add a block, or change its rank. Ranks of one set can be compared with one another."""
        self._count += 1
        self._entry[block] = self._count
        heappush(self._heap, (rank, self._count, block))
        if len(self._heap) > 2 * len(self._entry) + SLACK:
            self._heap = [item for item in self._heap if self._entry.get(item[2]) == item[1]]
            heapify(self._heap)

    def discard(self, block: int) -> None:
        self._entry.pop(block, None)

    def pop(self) -> tuple[int, Any] | None:
        """Take out the block with the lowest rank: the block and its rank, None if there is
        none."""
        while self._heap:
            rank, number, block = heappop(self._heap)
            if self._entry.get(block) == number:
                del self._entry[block]
                return block, rank
        return None

    def lowest(self, count: int) -> list[int]:
        """The `count` blocks with the lowest ranks (all, if there are fewer), lowest first."""
        found: list[tuple[Any, int, int]] = []
        while len(found) < count and self._heap:
            item = heappop(self._heap)
            if self._entry.get(item[2]) == item[1]:
                found.append(item)
        for item in found:
            heappush(self._heap, item)
        return [block for _, _, block in found]


class LowestFirst(ABC):
    """Gives up the block of the lowest rank, among equals the one released first. O(log n) per
    block, besides `rank`."""

    def __init__(self) -> None:
        self._free = Ranked()

    @abstractmethod
    def rank(self, block: CachedBlock) -> Any:
        """The rank of a block that is released."""

    def published(self, block: CachedBlock) -> None:
        """It is in use, and so has no rank yet."""
        return

    def released(self, block: CachedBlock) -> None:
        self._free.put(block.block, self.rank(block))

    def reused(self, block: CachedBlock) -> None:
        self._free.discard(block.block)

    def removed(self, block: CachedBlock) -> None:
        self._free.discard(block.block)

    def victims(self, count: int) -> Sequence[int]:
        return self._free.lowest(count)
