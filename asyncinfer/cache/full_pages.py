"""`FullPages`: pages of the layers that see every token."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Sequence
from typing import Final

from asyncinfer.cache.entry import CacheEntry
from asyncinfer.cache.page_pool import PagePool
from asyncinfer.cache.prefix_cache import PrefixCache

__all__ = ["FullPages"]


class FullPages:
    """The first `PageGroup`. Its pages are the blocks that the prefix cache knows: the cache keeps
    published ones, and says which of them is evicted first."""

    #: A request holds a page for each of its blocks, however many they are.
    steady: Final = sys.maxsize

    def __init__(self, num_pages: int, cache: PrefixCache | None) -> None:
        self.pool = PagePool(num_pages)
        self._cache = cache

    @property
    def available(self) -> int:
        return len(self.pool.free) + self.cached

    @property
    def cached(self) -> int:
        return 0 if self._cache is None else self._cache.evictable

    def first(self, position: int) -> int:
        return 0

    def usable(self, entries: Sequence[CacheEntry]) -> int:
        return len(entries)

    def pages(self, entries: Sequence[CacheEntry]) -> list[int]:
        return [entry.block for entry in entries]

    def take(self, count: int) -> list[int]:
        return self.pool.take(count)

    def hold(self, pages: Iterable[int]) -> None:
        refs = self.pool.refs
        for page in pages:
            refs[page] += 1

    def release(self, page: int, *, passing: bool = False) -> None:
        refs = self.pool.refs
        assert refs[page] > 0, "released more often than taken"
        refs[page] -= 1
        if not refs[page] and (self._cache is None or not self._cache.release(page)):
            self.pool.put(page)
