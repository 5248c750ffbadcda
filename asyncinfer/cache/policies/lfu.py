"""Least frequently used."""

from __future__ import annotations

from asyncinfer.cache.policies.ranked import LowestFirst
from asyncinfer.protocols.eviction import CachedBlock

__all__ = ["LFU"]


class LFU(LowestFirst):
    """Gives up the block that the fewest requests reused, among equals the one released first.
    A request that hits a block hits every block before it, so a prefix's end never outranks its
    beginning. O(log n) per block."""

    def rank(self, block: CachedBlock) -> int:
        return block.uses
