"""Time to live."""

from __future__ import annotations

import math
from collections.abc import Mapping
from types import MappingProxyType

from asyncinfer.cache.policies.ranked import LowestFirst
from asyncinfer.protocols.eviction import CachedBlock

__all__ = ["TTL"]

NO_SCOPES: Mapping[str, float] = MappingProxyType({})


class TTL(LowestFirst):
    """Gives up the block that expires first: a number of seconds after its last use, which its
    scope decides. Tenants who talk keep their prefixes longer than those who run batches. Expired
    blocks stay, and can be hit, until their room is wanted. O(log n) per block.

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
        super().__init__()
        self._seconds = seconds
        self._scopes = dict(scopes)

    def rank(self, block: CachedBlock) -> float:
        return block.now + self._scopes.get(block.scope, self._seconds)
