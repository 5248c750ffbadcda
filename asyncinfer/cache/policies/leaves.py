"""Policies that never break a prefix in the middle: only its end may go."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from itertools import islice
from typing import Any, Protocol

from asyncinfer.cache.policies.ranked import Ranked
from asyncinfer.protocols.eviction import CachedBlock

__all__ = ["LeavesFirst", "TailFirst"]


class Order(Protocol):
    """The leaves, in the order of their ranks."""

    def put(self, block: int, rank: Any) -> None:
        """Add a block."""

    def discard(self, block: int) -> None:
        """Take out a block, if it is there."""

    def pop(self) -> tuple[int, Any] | None:
        """Take out the block of the lowest rank; None if there is none."""


class LeavesFirst(ABC):
    """Gives up the leaf of the lowest rank: a block without cached blocks after it. A block
    behind a gap can never be hit, so evicting anything but a leaf wastes the room of all blocks
    that follow it. O(log n) per block, besides `rank`."""

    def __init__(self) -> None:
        self._blocks: dict[int, CachedBlock] = {}
        #: Ranks of the evictable blocks, in the order of release.
        self._ranks: dict[int, Any] = {}
        self._leaves: Order = Ranked()

    @abstractmethod
    def rank(self, block: CachedBlock) -> Any:
        """The rank of a block that is released; the lowest goes first."""

    def published(self, block: CachedBlock) -> None:
        self._blocks[block.block] = block
        if block.parent is not None:
            # The parent is evictable if another request computed the same prefix in its own blocks.
            self._leaves.discard(block.parent)

    def released(self, block: CachedBlock) -> None:
        rank = self._ranks[block.block] = self.rank(block)
        if not block.children:
            self._leaves.put(block.block, rank)

    def reused(self, block: CachedBlock) -> None:
        self._ranks.pop(block.block, None)
        self._leaves.discard(block.block)

    def removed(self, block: CachedBlock) -> None:
        self.reused(block)
        del self._blocks[block.block]
        parent = self._parent(block)
        if parent is not None and not parent.children:
            self._leaves.put(parent.block, self._ranks[parent.block])

    def victims(self, count: int) -> Sequence[int]:
        found: dict[int, Any] = {}
        left: dict[int, int] = {}
        bared = set()
        while len(found) < count and (lowest := self._leaves.pop()) is not None:
            number, rank = lowest
            found[number] = rank
            # With its last leaf gone, the parent would be a leaf.
            parent = self._parent(self._blocks[number])
            if parent is not None and parent.block not in found:
                left[parent.block] = left.get(parent.block, parent.children) - 1
                if not left[parent.block]:
                    bared.add(parent.block)
                    self._leaves.put(parent.block, self._ranks[parent.block])
        # Nothing has changed until the engine calls `removed`.
        for number, rank in found.items():
            self._leaves.put(number, rank)
        for number in bared:
            self._leaves.discard(number)
        # No leaf is evictable when all are used by requests that hold copies of the blocks before.
        return list(found) or list(islice(self._ranks, count))

    def _parent(self, block: CachedBlock) -> CachedBlock | None:
        """The parent, if it is evictable."""
        if block.parent is None or block.parent not in self._ranks:
            return None
        return self._blocks[block.parent]


class TailFirst(LeavesFirst):
    """Gives up the least recently used leaf: LRU that never breaks a prefix in the middle, not
    even where two requests computed the same one at the same time."""

    def rank(self, block: CachedBlock) -> int:
        return block.last_use
