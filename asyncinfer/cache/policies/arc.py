"""Adaptive replacement cache."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import islice

from asyncinfer.cache.policies.ghosts import Ghosts
from asyncinfer.protocols.eviction import CachedBlock

__all__ = ["ARC"]


class ARC:
    """Divides the cache between blocks used once and blocks used more often: whichever kind comes
    back after it was given up gets more room (Megiddo and Modha, "ARC: a self-tuning, low overhead
    replacement cache", FAST 2003).

    Two lists of blocks, least recently released first, and two of ghosts: the keys that each of
    them gave up. A ghost that comes back moves the balance to its list. The paper's capacity is
    here the largest number of cached blocks seen. O(1) per block.
    """

    def __init__(self) -> None:
        self._once = _List()
        self._often = _List()
        self._of: dict[int, _List] = {}
        self._capacity = 0
        #: How many blocks the first list should have.
        self._target = 0.0

    def published(self, block: CachedBlock) -> None:
        once, often = self._once, self._often
        if once.ghosts.take(block.key):
            step = max(1.0, len(often.ghosts) / (len(once.ghosts) + 1))
            self._target = min(float(self._capacity), self._target + step)
            self._enter(block, often)
        elif often.ghosts.take(block.key):
            step = max(1.0, len(once.ghosts) / (len(often.ghosts) + 1))
            self._target = max(0.0, self._target - step)
            self._enter(block, often)
        else:
            self._enter(block, once)
        self._capacity = max(self._capacity, len(self._of))

    def released(self, block: CachedBlock) -> None:
        self._of[block.block].free[block.block] = None

    def reused(self, block: CachedBlock) -> None:
        self._leave(block)
        self._enter(block, self._often)

    def removed(self, block: CachedBlock) -> None:
        origin = self._leave(block)
        origin.ghosts.add(block.key, True)
        once, often = self._once, self._often
        for _ in once.ghosts.trim(max(0, self._capacity - once.size)):
            pass
        room = 2 * self._capacity - len(self._of) - len(once.ghosts)
        for _ in often.ghosts.trim(max(0, room)):
            pass

    def victims(self, count: int) -> Sequence[int]:
        once, often = self._once, self._often
        surplus = once.size - int(self._target)
        first = min(count, max(0, surplus), len(once.free))
        second = min(count - first, len(often.free))
        found = [*islice(once.free, first), *islice(often.free, second)]
        # The second list had too few.
        found += islice(once.free, first, first + count - len(found))
        return found

    def _enter(self, block: CachedBlock, target: _List) -> None:
        self._of[block.block] = target
        target.size += 1

    def _leave(self, block: CachedBlock) -> _List:
        origin = self._of.pop(block.block)
        origin.size -= 1
        origin.free.pop(block.block, None)
        return origin


class _List:
    """One of the two lists, with its ghosts."""

    def __init__(self) -> None:
        #: Blocks, those in use too; and the evictable ones in the order of release.
        self.size = 0
        self.free: dict[int, None] = {}
        self.ghosts = Ghosts[bool]()
