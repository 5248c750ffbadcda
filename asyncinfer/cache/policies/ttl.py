"""Time to live."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from types import MappingProxyType

from asyncinfer.cache.policies.ranked import Ranked
from asyncinfer.protocols.eviction import CachedBlock

__all__ = ["TTL"]

NO_SCOPES: Mapping[str, float] = MappingProxyType({})


class TTL:
    """Gives up the block whose time is up first: so many seconds after its last use, by its
    scope. Tenants who talk keep their prefixes longer than those who run batches. Expired blocks
    stay, and can be hit, until their room is wanted. O(log n) per block.

    Args:
        seconds: life of a block after its last use, above 0.
        scopes: other lives for some scopes.

    Raises:
        ValueError: a life is not a positive, finite number.
    """

    def __init__(self, seconds: float = 300.0, scopes: Mapping[str, float] = NO_SCOPES) -> None:
        for name, life in (("seconds", seconds), *scopes.items()):
            if not (math.isfinite(life) and life > 0):
                raise ValueError(f"{name}: a life of {life!r} seconds; must be above 0 and finite")
        self._seconds = seconds
        self._scopes = dict(scopes)
        self._free = Ranked()

    def published(self, block: CachedBlock) -> None:
        pass

    def released(self, block: CachedBlock) -> None:
        life = self._scopes.get(block.scope, self._seconds)
        self._free.put(block.block, block.now + life)

    def reused(self, block: CachedBlock) -> None:
        self._free.discard(block.block)

    def removed(self, block: CachedBlock) -> None:
        self._free.discard(block.block)

    def victims(self, count: int) -> Sequence[int]:
        return self._free.lowest(count)
