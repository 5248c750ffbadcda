"""Least frequently used."""

from __future__ import annotations

from collections.abc import Sequence

from asyncinfer.cache.policies.ranked import Ranked
from asyncinfer.protocols.eviction import CachedBlock

__all__ = ["LFU"]


class LFU:
    """Gives up the block that the fewest requests reused, among equals the one released first.
    A request that hits a block hits every block before it, so a prefix's end never outranks its
    beginning. O(log n) per block."""

    def __init__(self) -> None:
        self._free = Ranked()

    def published(self, block: CachedBlock) -> None:
        pass

    def released(self, block: CachedBlock) -> None:
        self._free.put(block.block, block.uses)

    def reused(self, block: CachedBlock) -> None:
        self._free.discard(block.block)

    def removed(self, block: CachedBlock) -> None:
        self._free.discard(block.block)

    def victims(self, count: int) -> Sequence[int]:
        return self._free.lowest(count)
