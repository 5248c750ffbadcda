"""`WatchedPages`: the fake model's pages beside what the scheduler says of them."""

from __future__ import annotations

from asyncinfer.cache import WindowPages
from asyncinfer.cache.prefix_cache import CacheEntry
from asyncinfer.scheduler import Scheduler
from asyncinfer.testing.fake_model import FakeRunner
from asyncinfer.testing.invariants import hold
from asyncinfer.testing.oracle import MASK, A, WindowSum, fake_kv, mix

__all__ = ["WatchedPages"]


class WatchedPages:
    """Poisons every page that became free since the last `check`, and compares every page that was
    published since with what it must hold."""

    def __init__(self, scheduler: Scheduler, runner: FakeRunner) -> None:
        self._cache = scheduler.cache
        self._size = scheduler.spec.block_size
        self._groups = scheduler.states.slots.blocks.groups
        self._windows = [group for group in self._groups if isinstance(group, WindowPages)]
        self._pages = runner.pages
        #: Of each group.
        self._free: list[set[int]] = [set(group.pool.free) for group in self._groups]
        #: Published entry -> KV and position of its last token.
        self._written: dict[CacheEntry, tuple[int, int]] = {}
        #: Of each group with a window: published block -> its entry and the page kept for it.
        self._kept: list[dict[int, tuple[CacheEntry, int]]] = [{} for _ in self._windows]

    def check(self) -> None:
        self.poison()
        self._check_written()
        for number, group in enumerate(self._windows):
            self._check_kept(number, group)

    def poison(self) -> None:
        """Poison what became free, and compare nothing."""
        free = [set(group.pool.free) for group in self._groups]
        for pages, now, before in zip(self._pages, free, self._free, strict=True):
            pages.poison(now - before)
        self._free = free

    def _check_written(self) -> None:
        """I5: a published page holds exactly the KV of its prefix."""
        if self._cache is None:
            return
        entries = self._cache.by_block.values()
        if len(self._written) != len(entries) or any(e not in self._written for e in entries):
            self._written = {e: self._written.get(e) or self._check_entry(e) for e in entries}

    def _check_kept(self, number: int, group: WindowPages) -> None:
        """I5: a kept page holds exactly what a window is to see."""
        kept: dict[int, tuple[CacheEntry, int]] = {}
        for block, page in group.kept.items():
            assert self._cache is not None
            kept[block] = entry, _ = self._cache.by_block[block], page
            if self._kept[number].get(block) != kept[block]:
                stored = self._stored(_prefix(entry))[-self._size :]
                right = self._pages[1 + number].page(page) == [near[1 + number] for near in stored]
                hold("I5", right, "page {} of group {} is wrong", page, 1 + number)
        self._kept[number] = kept

    def _stored(self, tokens: list[int]) -> list[tuple[int, ...]]:
        """What the groups have to hold of a sequence."""
        return fake_kv(tokens, [WindowSum(group.window, 0) for group in self._windows])

    def _check_entry(self, entry: CacheEntry) -> tuple[int, int]:
        """Checks the entry's page; returns KV and position of its last token."""
        held = self._pages[0].page(entry.block)
        if self._windows:
            kvs = [kv for kv, *_ in self._stored(_prefix(entry))]
            hold("I5", held == kvs[-self._size :], "block {} holds something else", entry.block)
            return kvs[-1], len(kvs) - 1
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
        hold("I5", held == expected, "block {} holds something else", entry.block)
        return kv, position


def _prefix(entry: CacheEntry) -> list[int]:
    """Every token up to the entry's last one."""
    parts = [entry.tokens]
    while isinstance(entry.parent, CacheEntry):
        entry = entry.parent
        parts.append(entry.tokens)
    return [token for part in reversed(parts) for token in part]
