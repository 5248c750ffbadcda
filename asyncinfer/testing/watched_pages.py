"""`WatchedPages`: the fake model's pages beside what the scheduler says of them."""

from __future__ import annotations

from asyncinfer.cache.prefix_cache import CacheEntry
from asyncinfer.scheduler import Scheduler
from asyncinfer.testing.fake_model import FakeRunner
from asyncinfer.testing.fake_windows import FakeWindows
from asyncinfer.testing.invariants import hold
from asyncinfer.testing.oracle import MASK, A, fake_kv, mix

__all__ = ["WatchedPages"]


class WatchedPages:
    """Poisons every page that became free since the last `check`, and compares every page that was
    published since with what it must hold."""

    def __init__(self, scheduler: Scheduler, runner: FakeRunner) -> None:
        self._scheduler = scheduler
        self._runner = runner
        self._free: set[int] = set(range(scheduler.spec.num_blocks))
        self._free_pages: set[int] = set(range(scheduler.spec.window_pages))
        #: Published entry -> KV and position of its last token.
        self._written: dict[CacheEntry, tuple[int, int]] = {}
        #: Published block -> its entry and the window page kept for it.
        self._kept: dict[int, tuple[CacheEntry, int]] = {}

    def check(self) -> None:
        self.poison()
        self._check_written()
        if self._runner.windows is not None:
            self._check_windows(self._runner.windows)

    def poison(self) -> None:
        """Poison what became free, and compare nothing."""
        free = set(self._scheduler.roster.seats.blocks.pool.free)
        self._runner.pages.poison(free - self._free)
        self._free = free

    def _check_written(self) -> None:
        """I5: a published page holds exactly the KV of its prefix."""
        cache = self._scheduler.cache
        if cache is None:
            return
        entries = cache.by_block.values()
        if len(self._written) != len(entries) or any(e not in self._written for e in entries):
            self._written = {e: self._written.get(e) or self._pages_of(e) for e in entries}

    def _check_windows(self, fake: FakeWindows) -> None:
        """Poison what became free; a kept page holds exactly what windows are to see."""
        windows, cache = self._scheduler.roster.seats.blocks.windows, self._scheduler.cache
        assert windows is not None
        free = set(windows.pool.free)
        fake.poison(free - self._free_pages)
        self._free_pages = free
        kept: dict[int, tuple[CacheEntry, int]] = {}
        for block, number in windows.kept.items():
            assert cache is not None
            kept[block] = entry, _ = cache.by_block[block], number
            if self._kept.get(block) != kept[block]:
                _, nears = fake_kv(_prefix(entry), windows.window)
                expected = nears[-windows.block_size :]
                hold("I5", fake.page(number) == expected, "window page {} is wrong", number)
        self._kept = kept

    def _pages_of(self, entry: CacheEntry) -> tuple[int, int]:
        """Checks the entry's page; returns KV and position of its last token."""
        if self._runner.windows is not None:
            tokens = _prefix(entry)
            kvs, _ = fake_kv(tokens, self._scheduler.spec.window)
            whole = self._runner.pages.page(entry.block) == kvs[-self._scheduler.spec.block_size :]
            hold("I5", whole, "block {} holds something else", entry.block)
            return kvs[-1], len(tokens) - 1
        chain = [entry]
        while isinstance(chain[-1].parent, CacheEntry) and chain[-1].parent not in self._written:
            chain.append(chain[-1].parent)
        above = chain[-1].parent
        kv, position = self._written[above] if isinstance(above, CacheEntry) else (0, -1)
        expected: list[int] = []
        for link in reversed(chain):
            expected = []
            for token in link.tokens:
                kv = (kv * A + mix(token + 1)) & MASK
                position += 1
                expected.append(kv)
        page = self._runner.pages.page(entry.block)
        hold("I5", page == expected, "block {} holds something else", entry.block)
        return kv, position


def _prefix(entry: CacheEntry) -> list[int]:
    """Every token up to the entry's last one."""
    parts = [entry.tokens]
    while isinstance(entry.parent, CacheEntry):
        entry = entry.parent
        parts.append(entry.tokens)
    return [token for part in reversed(parts) for token in part]
