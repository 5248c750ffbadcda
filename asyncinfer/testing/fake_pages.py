"""`FakePages`: what one KV group of the fake model stores."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np
import numpy.typing as npt

from asyncinfer.scheduler import RunnerSpec
from asyncinfer.testing.fake_slots import FakeSlots
from asyncinfer.testing.oracle import MASK, mix

__all__ = ["FakePages"]

U64 = npt.NDArray[np.uint64]
I64 = npt.NDArray[np.int64]


class FakePages:
    """64 bits for each token, in pages that are found through the slots' block tables."""

    def __init__(self, spec: RunnerSpec, slots: FakeSlots, group: int) -> None:
        num_pages = spec.groups[group].num_pages
        self._group = group
        self._size = spec.block_size
        self._slots = slots
        self._tables = slots.tables[group]
        self._entries: U64 = np.empty((num_pages, spec.block_size), np.uint64)
        self._poisoned = 0
        self.poison(range(num_pages))

    def poison(self, pages: Iterable[int]) -> None:
        """Fill pages with garbage, so that whoever still reads them shows it."""
        for page in pages:
            self._entries[page] = self._garbage()

    def page(self, page: int) -> list[int]:
        """The entries of a page."""
        return [int(entry) for entry in self._entries[page]]

    def copy(self, pairs: Sequence[tuple[int, int]]) -> None:
        for source, target in pairs:
            self._entries[target] = self._entries[source]

    def spoil(self, slot: int, start: int, count: int) -> None:
        """Garbage in place of what a row stored."""
        self._entries[self._at(slot, np.arange(start, start + count))] = self._garbage()

    def _garbage(self) -> int:
        """Numbers that no other group has."""
        self._poisoned += 1
        return mix((self._poisoned - (self._group << 48)) & MASK)

    def _at(self, slots: I64 | int, positions: I64) -> tuple[I64, I64]:
        pages: I64 = self._tables[slots, positions // self._size]
        return pages, positions % self._size
