"""`WatchedPages`: the fake model's pages beside what the scheduler says of them."""

from __future__ import annotations

from collections.abc import Mapping

from asyncinfer.cache import StatePages, WindowPages
from asyncinfer.cache.entry import CacheEntry
from asyncinfer.scheduler import Scheduler
from asyncinfer.testing.invariants import hold
from asyncinfer.testing.oracle import RunningHash, Seen, WindowSum, fake_kv
from asyncinfer.testing.strict_runner import StrictRunner

__all__ = ["WatchedPages"]


class WatchedPages:
    """Poisons every page that became free since the last `check`, and compares every page that was
    published since with what it must hold."""

    def __init__(
        self, scheduler: Scheduler, runner: StrictRunner, adapters: Mapping[str, int] | None = None
    ) -> None:
        """`adapters`: by the key that prefixes are cached by, the fake adapter it stands for."""
        self._adapters = {} if adapters is None else adapters
        self._cache = scheduler.cache
        self._size = scheduler.spec.block_size
        self._groups = scheduler.states.slots.blocks.groups
        self._windows = [group for group in self._groups if isinstance(group, WindowPages)]
        self._pages = runner.pages
        #: Free pages of each group, and the list of them as it was when it was looked at last.
        self._free: list[set[int]] = [set(group.pool.free) for group in self._groups]
        self._listed: list[list[int]] = [[] for _ in self._groups]
        #: Published entry -> what each group has to hold of its prefix, by position.
        self._stored: dict[CacheEntry, list[tuple[int, ...]]] = {}
        #: Of each group with a window: published block -> its entry and the page kept for it.
        self._kept: list[dict[int, tuple[CacheEntry, int]]] = [{} for _ in self._windows]

    def check(self) -> None:
        self.poison()
        self._check_written()
        for number, group in enumerate(self._windows):
            self._check_kept(number, group)

    def poison(self) -> None:
        """Poison pages that became free, and compare nothing."""
        for number, group in enumerate(self._groups):
            listed = group.pool.free
            if listed == self._listed[number]:
                continue
            free, self._listed[number] = set(listed), [*listed]
            self._pages[number].poison(free - self._free[number])
            self._free[number] = free

    def _check_written(self) -> None:
        """I5: a published page holds exactly the KV of its prefix."""
        if self._cache is None:
            return
        entries = self._cache.by_block.values()
        for entry in [entry for entry in entries if entry not in self._stored]:
            expected = [kv for kv, *_ in self._prefix(entry)[-self._size :]]
            right = self._pages[0].page(entry.block) == expected
            hold("I5", right, "block {} holds something else", entry.block)
        if len(self._stored) != len(entries):
            self._stored = {entry: self._stored[entry] for entry in entries}

    def _check_kept(self, number: int, group: WindowPages) -> None:
        """I5: a kept page holds exactly what a window is to see, or the state after its block."""
        kept: dict[int, tuple[CacheEntry, int]] = {}
        for block, page in group.kept.items():
            assert self._cache is not None
            kept[block] = entry, _ = self._cache.by_block[block], page
            if self._kept[number].get(block) != kept[block]:
                last = 1 if isinstance(group, StatePages) else self._size
                stored = self._prefix(entry)[-last:]
                right = self._pages[1 + number].page(page) == [near[1 + number] for near in stored]
                hold("I5", right, "page {} of group {} is wrong", page, 1 + number)
        self._kept[number] = kept

    def _prefix(self, entry: CacheEntry) -> list[tuple[int, ...]]:
        """What the groups have to hold of the tokens up to an entry's last one."""
        stored = self._stored.get(entry)
        if stored is None:
            above = self._prefix(entry.parent) if isinstance(entry.parent, CacheEntry) else []
            windows: list[Seen] = []
            for number, group in enumerate(self._windows, 1):
                if isinstance(group, StatePages):
                    windows.append(RunningHash(above[-1][number] if above else 0))
                    continue
                seen = above[max(0, len(above) - group.window + 1) :]
                past = [near[number] for near in seen]
                windows.append(WindowSum(group.window, len(above), past))
            if isinstance(entry.parent, CacheEntry):
                kv = above[-1][0]
            else:
                kv = self._adapters.get(entry.parent[1], 0)
            stored = self._stored[entry] = above + fake_kv(entry.tokens, windows, kv)
        return stored
