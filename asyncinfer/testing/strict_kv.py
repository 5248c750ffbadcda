"""`StrictKV`: what the KV groups of the strict fake model store, as seen through block tables."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from operator import mul

from asyncinfer.scheduler import Join, RunnerSpec
from asyncinfer.testing.oracle import (
    MASK,
    STATE,
    A,
    RunningHash,
    Seen,
    WindowSum,
    added,
    fake_kv,
    mix,
    weight,
    windows_of,
)

__all__ = ["StrictKV", "StrictPages", "StrictSlot"]


class StrictPages:
    """What one KV group stores: 64 bits for each token, or for each block with `size` 1. New pages
    hold garbage."""

    def __init__(self, count: int, size: int, group: int) -> None:
        self._size = size
        self._group = group
        self._poisoned = 0
        #: By page; a page is changed in place.
        self.entries: list[list[int]] = [[] for _ in range(count)]
        self.poison(range(count))

    def poison(self, pages: Iterable[int]) -> None:
        """Fill pages with garbage, which any further reader reveals."""
        for page in pages:
            self.entries[page] = [self.garbage()] * self._size

    def page(self, page: int) -> list[int]:
        """The entries of a page."""
        return self.entries[page]

    def store(self, page: int, position: int, entry: int) -> None:
        """Store the entry of the token at `position`; a state replaces the one before it."""
        self.entries[page][position % self._size] = entry

    def copy(self, pairs: Sequence[tuple[int, int]]) -> None:
        for source, target in pairs:
            self.entries[target] = self.entries[source].copy()

    def garbage(self) -> int:
        """Numbers that no other group has."""
        self._poisoned += 1
        return mix((self._poisoned - (self._group << 48)) & MASK)


@dataclass(slots=True)
class StrictSlot:
    """A slot of the strict fake model."""

    join: Join
    #: Every known token, including those just drawn.
    tokens: list[int]
    #: The block table of each KV group.
    tables: list[list[int]]
    #: Tokens in the KV cache; None until the first step.
    computed: int | None = None
    #: How many of the last tokens may be rejected: drafts, after which tokens may follow that were
    #: not drawn.
    unsure: int = 0
    #: The states after each drafted token of the last row, by the sequence's length then and by
    #: group.
    aside: dict[int, dict[int, int]] = field(default_factory=dict)


class StrictKV:
    """The pages of all KV groups. A slot's tokens are read and written through its block tables,
    and a table that lacks a page fails."""

    def __init__(self, spec: RunnerSpec) -> None:
        self._size = spec.block_size
        self._windows = windows_of(spec.groups)
        self._weights = [*map(weight, range(spec.max_context))]
        #: What each KV group stores.
        self.pages = [
            StrictPages(group.num_pages, 1 if group.state else spec.block_size, number)
            for number, group in enumerate(spec.groups)
        ]

    def read(self, slot: StrictSlot, start: int, adapter: int) -> tuple[int, int, list[Seen]]:
        """KV, digest and windows before `start`, from every entry. The first token's KV begins with
        `adapter`."""
        windows: list[Seen] = []
        for number, window in enumerate(self._windows, 1):
            if window == STATE:
                windows.append(RunningHash(self.state(slot, number, start)))
                continue
            entries = self._entries(slot, number, max(0, start - window + 1), start)
            windows.append(WindowSum(window, start, entries))
        if not start:
            return adapter, 0, windows
        entries = self._entries(slot, 0, 0, start)
        return entries[-1], sum(map(mul, entries, self._weights)) & MASK, windows

    def state(self, slot: StrictSlot, group: int, tokens: int) -> int:
        """A group's state after so many tokens, if its page still has that state."""
        if not tokens:
            return 0
        page = slot.tables[group][(tokens - 1) // self._size]
        assert page >= 0, f"slot {slot.join.slot} lacks a page of group {group}"
        return self.pages[group].entries[page][0]

    def _entries(self, slot: StrictSlot, group: int, start: int, end: int) -> list[int]:
        """The entries of the tokens from `start` to `end` in a group."""
        size, pages = self._size, self.pages[group].entries
        found: list[int] = []
        for page in slot.tables[group][start // size : -(-end // size)]:
            assert page >= 0, f"slot {slot.join.slot} lacks a page of group {group}"
            found += pages[page]
        skipped = start % size
        return found[skipped : skipped + end - start]

    def write(
        self, slot: StrictSlot, start: int, count: int, kv: int, digest: int, windows: list[Seen]
    ) -> int:
        """Store a row's entries in all groups, and return the digest of its last token."""
        size, weights, tokens = self._size, self._weights, slot.tokens
        if not windows:
            pages, table = self.pages[0].entries, slot.tables[0]
            for position in range(start, start + count):
                kv = (kv * A + added(tokens[position])) & MASK
                pages[table[position // size]][position % size] = kv
                digest += kv * weights[position]
            return digest & MASK
        row = fake_kv(tokens[start : start + count], windows, kv)
        for position, stored in enumerate(row, start):
            for pages_of, table, entry in zip(self.pages, slot.tables, stored, strict=True):
                pages_of.store(table[position // size], position, entry)
            digest += stored[0] * weights[position]
        return digest & MASK
