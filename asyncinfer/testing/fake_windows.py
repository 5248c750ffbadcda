"""`FakeWindows`: the fake model's windowed layer, and its pages."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np
import numpy.typing as npt

from asyncinfer.scheduler.plan import RunnerSpec, StepPlan
from asyncinfer.testing.fake_slots import FakeSlots
from asyncinfer.testing.oracle import MASK, A, WindowSum, mix

__all__ = ["FakeWindows"]

U64 = npt.NDArray[np.uint64]


class FakeWindows:
    """What the windowed layer stores lies in pages that are found through the slots' window tables.
    Only entries that a window shows are read, and each of them matters."""

    def __init__(self, spec: RunnerSpec, slots: FakeSlots) -> None:
        assert spec.window is not None
        self._window = spec.window
        self._size = spec.block_size
        self._slots = slots
        self._pages: U64 = np.empty((spec.window_pages, spec.block_size), np.uint64)
        self._garbage = 0
        self.poison(range(spec.window_pages))

    def poison(self, pages: Iterable[int]) -> None:
        """Fill pages with garbage."""
        for page in pages:
            self._garbage += 1
            self._pages[page] = mix(self._garbage ^ MASK)

    def page(self, page: int) -> list[int]:
        """The entries a page holds."""
        return [int(entry) for entry in self._pages[page]]

    def copy(self, pairs: Sequence[tuple[int, int]]) -> None:
        for source, target in pairs:
            self._pages[target] = self._pages[source]

    def read(self, plan: StepPlan) -> list[WindowSum]:
        """Each row's window before its first token."""
        return [
            WindowSum(
                self._window,
                start,
                [
                    int(self._pages[self._at(slot, p)])
                    for p in range(max(0, start - self._window + 1), start)
                ],
            )
            for slot, start in zip(plan.slots, plan.starts, strict=True)
        ]

    def compute(
        self, slot: int, start: int, tokens: Sequence[int], kv: int, seen: WindowSum
    ) -> list[int]:
        """The KV of a row's tokens after one with `kv`; stores what the layer stores of them."""
        found = []
        for position, token in enumerate(tokens, start):
            entry = seen.entry(kv, token)
            self._pages[self._at(slot, position)] = entry
            kv = (kv * A + mix(token + 1) + seen.add(entry)) & MASK
            found.append(kv)
        return found

    def spoil(self, slot: int, start: int, count: int) -> None:
        """Garbage in place of what a row stored."""
        self._garbage += 1
        for position in range(start, start + count):
            self._pages[self._at(slot, position)] = mix(self._garbage ^ MASK)

    def _at(self, slot: int, position: int) -> tuple[int, int]:
        page = int(self._slots.pages[slot, position // self._size])
        assert page >= 0, f"slot {slot} has no window page for position {position}"
        return page, position % self._size
