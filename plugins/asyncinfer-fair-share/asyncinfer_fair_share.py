"""A cache policy for many tenants: the scope that holds the most idle blocks gives some up."""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from itertools import islice

from asyncinfer.protocols import CachedBlock

__all__ = ["FairShare"]


class FairShare:
    """Takes from the scope (`cache_scope` of a request) with the most evictable blocks, there
    the block that was released first. A tenant that floods the cache loses its own prefixes, not
    those of others. O(log scopes) per block."""

    protocol_version = 1

    def __init__(self) -> None:
        #: Scope -> its evictable blocks, in the order of release.
        self._idle: dict[str, dict[int, None]] = {}
        #: (-size, scope), one for every change of a size; those that are not true any more are
        #: dropped when they surface.
        self._sizes: list[tuple[int, str]] = []

    def published(self, block: CachedBlock) -> None:
        """In use: nothing to rank yet."""

    def released(self, block: CachedBlock) -> None:
        self._idle.setdefault(block.scope, {})[block.block] = None
        self._note(block.scope)

    def reused(self, block: CachedBlock) -> None:
        self.removed(block)

    def removed(self, block: CachedBlock) -> None:
        idle = self._idle.get(block.scope, {})
        if block.block in idle:
            del idle[block.block]
            self._note(block.scope)

    def victims(self, count: int) -> Sequence[int]:
        """Blocks of the largest scope, so many that it becomes no smaller than the second: fewer
        than `count` may be named, and the engine asks again."""
        self._drop_untrue()
        if not self._sizes:
            return []
        size, largest = heapq.heappop(self._sizes)
        self._drop_untrue()
        second = -self._sizes[0][0] if self._sizes else 0
        heapq.heappush(self._sizes, (size, largest))
        return list(islice(self._idle[largest], min(count, max(1, -size - second))))

    def _note(self, scope: str) -> None:
        size = len(self._idle[scope])
        if size:
            heapq.heappush(self._sizes, (-size, scope))
        else:
            del self._idle[scope]
        if len(self._sizes) > 64 + 4 * len(self._idle):
            self._sizes = [(-len(idle), scope) for scope, idle in self._idle.items()]
            heapq.heapify(self._sizes)

    def _drop_untrue(self) -> None:
        while self._sizes:
            size, scope = self._sizes[0]
            if len(self._idle.get(scope, ())) == -size:
                return
            heapq.heappop(self._sizes)
