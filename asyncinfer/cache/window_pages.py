"""`WindowPages`: pages of the layers that see a window only."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from asyncinfer.cache.entry import CacheEntry
from asyncinfer.cache.page_group import BlockTable
from asyncinfer.cache.page_pool import PagePool

__all__ = ["WindowPages", "reach_of", "steady_pages"]


def reach_of(window: int, block_size: int) -> int:
    """How many full blocks before a block's first token hold a token that this first token sees."""
    return -(-(window - 1) // block_size)


def steady_pages(window: int, block_size: int) -> int:
    """Pages that a decoding request may hold while one step is in flight: a window may begin and
    end within a page, and the next token is written to one more."""
    return reach_of(window, block_size) + 2


class WindowPages:
    """A `DependentGroup`. A request has pages for the blocks that its next token sees, and gives
    the others back as it goes on.

    The page of a published block is kept until another block needs it or its own is evicted.
    Pages that a request left behind as it went on are taken first, since a hit rarely ends there;
    then, least recently used first, those that a request ended with or that were asked for again.
    A page without references is either free or kept.

    Args:
        window: tokens that a token sees, itself among them.
        block_size: tokens of a page.
    """

    def __init__(self, num_pages: int, window: int, block_size: int) -> None:
        self.window = window
        self.block_size = block_size
        self.reach = reach_of(window, block_size)
        self.steady = steady_pages(window, block_size)
        assert num_pages >= self.steady, "no request could be sure to go on"
        self.pool = PagePool(num_pages)
        #: Published block -> its page, and back.
        self.kept: dict[int, int] = {}
        self.keeper: dict[int, int] = {}
        #: Kept pages without references, in the order of release: those left behind, and others.
        self.passed: dict[int, None] = {}
        self.unused: dict[int, None] = {}
        #: Kept pages that were asked for again.
        self._wanted: set[int] = set()

    @property
    def available(self) -> int:
        return len(self.pool.free) + self.cached

    @property
    def cached(self) -> int:
        return len(self.passed) + len(self.unused)

    def first(self, position: int) -> int:
        return max(0, position - self.window + 1) // self.block_size

    def can_fork(self, table: BlockTable, length: int, computed: int) -> bool:
        return table.first_live_page <= self.first(length)

    def usable(self, entries: Sequence[CacheEntry]) -> int:
        most = run = 0
        for count, entry in enumerate(entries, start=1):
            run = run + 1 if entry.block in self.kept else 0
            if run >= min(self.reach, count):
                most = count
        return most

    def pages(self, entries: Sequence[CacheEntry]) -> list[int]:
        seen = entries[max(0, len(entries) - self.reach) :]
        return [self.kept[entry.block] for entry in seen]

    def take(self, count: int) -> list[int]:
        missing = count - len(self.pool.free)
        while missing > 0:
            page = next(iter(self.passed or self.unused))
            self.drop(self.keeper[page])
            missing -= 1
        return self.pool.take(count)

    def hold(self, pages: Iterable[int]) -> None:
        refs = self.pool.refs
        for page in pages:
            refs[page] += 1
            self._wanted.add(page)
            self.passed.pop(page, None)
            self.unused.pop(page, None)

    def release(self, page: int, *, passing: bool = False) -> None:
        refs = self.pool.refs
        assert refs[page] > 0, "released more often than taken"
        refs[page] -= 1
        if refs[page]:
            return
        if page not in self.keeper:
            self._wanted.discard(page)
            self.pool.put(page)
        elif passing and page not in self._wanted:
            self.passed[page] = None
        else:
            self.unused[page] = None

    def leave(self, page: int, index: int) -> None:
        self.release(page, passing=True)

    def keep(self, block: int, page: int, *, again: bool) -> None:
        if block not in self.kept and page not in self.keeper:
            self.kept[block] = page
            self.keeper[page] = block
            if again:
                self._wanted.add(page)

    def drop(self, block: int) -> None:
        page = self.kept.pop(block, None)
        if page is not None:
            del self.keeper[page]
            if not self.pool.refs[page]:
                self.passed.pop(page, None)
                self.unused.pop(page, None)
                self._wanted.discard(page)
                self.pool.put(page)
