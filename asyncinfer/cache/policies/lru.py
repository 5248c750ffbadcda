"""Least recently used: the default eviction policy, and the one that replaces a broken one."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import islice

from asyncinfer.protocols.eviction import CachedBlock

__all__ = ["LRU"]


class LRU:
    """Gives up the block that was released first. Requests release their blocks tail first, so
    the ends of prefixes go before their beginnings. Every call is O(1) per block."""

    def __init__(self) -> None:
        # A dict keeps insertion order: the order of release.
        self._order: dict[int, None] = {}

    def published(self, block: CachedBlock) -> None:
        pass

    def released(self, block: CachedBlock) -> None:
        self._order[block.block] = None

    def reused(self, block: CachedBlock) -> None:
        self._order.pop(block.block, None)

    def removed(self, block: CachedBlock) -> None:
        self._order.pop(block.block, None)

    def victims(self, count: int) -> Sequence[int]:
        return list(islice(self._order, count))
