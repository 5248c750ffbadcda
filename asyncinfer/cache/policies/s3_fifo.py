"""Three FIFO queues."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import islice

from asyncinfer.cache.policies.ghosts import Ghosts
from asyncinfer.protocols.eviction import CachedBlock

__all__ = ["S3FIFO"]

#: Uses that count.
MOST = 3


class S3FIFO:
    """New blocks pass through a small queue. A block without a use meanwhile leaves at its end. A
    used one goes to the main queue, as does a ghost that comes back; each use there earns another
    round. (Yang et al., "FIFO queues are all you need for cache eviction", SOSP 2023, asks for two
    uses; prompts are repeated less.)

    A block enters its queue when it is first released, so a prompt's end is ahead of its
    beginning. One that is met in use leaves the queue and enters the main one when it is
    released. O(1) per block, amortised.

    Args:
        small: part of the cache that the small queue may have, above 0 and below 1.

    Raises:
        ValueError: `small` is out of bounds.
    """

    def __init__(self, small: float = 0.1) -> None:
        if not 0 < small < 1:
            raise ValueError(f"small: {small!r}; must be above 0 and below 1")
        self._share = small
        #: Block -> uses that still count.
        self._small: dict[int, int] = {}
        self._main: dict[int, int] = {}
        self._used: set[int] = set()
        self._promoted: set[int] = set()
        #: Victims offered and not yet removed -> whether each was in the small queue.
        self._leaving: dict[int, bool] = {}
        self._ghosts = Ghosts[bool]()

    def published(self, block: CachedBlock) -> None:
        self._used.add(block.block)
        if self._ghosts.take(block.key):
            self._promoted.add(block.block)

    def released(self, block: CachedBlock) -> None:
        number = block.block
        self._used.discard(number)
        if number not in self._small and number not in self._main:
            queue = self._main if number in self._promoted else self._small
            queue[number] = 0

    def reused(self, block: CachedBlock) -> None:
        number = block.block
        self._used.add(number)
        if self._leaving.pop(number, None) is not None:
            self._promoted.add(number)
        for queue in (self._small, self._main):
            if number in queue:
                queue[number] = min(MOST, queue[number] + 1)

    def removed(self, block: CachedBlock) -> None:
        number = block.block
        was_small = self._leaving.pop(number, number in self._small)
        for queue in (self._small, self._main):
            queue.pop(number, None)
        self._promoted.discard(number)
        self._used.discard(number)
        if was_small:
            self._ghosts.add(block.key, True)
            for _ in self._ghosts.trim(len(self._main)):
                pass

    def victims(self, count: int) -> Sequence[int]:
        while len(self._leaving) < count and (self._small or self._main):
            small, main = self._small, self._main
            if len(small) > self._share * (len(small) + len(main)) or not main:
                self._step(small)
            else:
                self._step(main)
        return list(islice(self._leaving, count))

    def _step(self, queue: dict[int, int]) -> None:
        """The head of a queue leaves it, or goes to the end of the main one."""
        number = next(iter(queue))
        uses = queue.pop(number)
        if number in self._used:
            self._promoted.add(number)
        elif queue is self._small and uses:
            self._promoted.add(number)
            self._main[number] = 0
        elif queue is self._main and uses:
            self._main[number] = uses - 1
        else:
            self._leaving[number] = queue is self._small
