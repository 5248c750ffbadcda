"""`Lateness`: how late an event loop runs its tasks, over any time in little memory."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Final

import anyio
import numpy as np

__all__ = ["Lateness", "watch_lateness"]

#: Milliseconds a bin is wide, and how many there are: a second in all, later is the last one's.
BIN: Final = 0.05
BINS: Final = 20_000
#: Seconds slept at a time.
PERIOD: Final = 0.001


class Lateness:
    """A histogram of milliseconds."""

    def __init__(self) -> None:
        self.max = 0.0
        self._bins = np.zeros(BINS, np.int64)

    def add(self, late: float) -> None:
        self.max = max(self.max, late)
        self._bins[min(BINS - 1, max(0, int(late / BIN)))] += 1

    def merge(self, other: Lateness) -> None:
        self.max = max(self.max, other.max)
        self._bins += other._bins

    @property
    def count(self) -> int:
        return int(self._bins.sum())

    def quantile(self, share: float) -> float:
        """The upper edge of the bin that holds it; 0 without samples."""
        if not self.count:
            return 0.0
        at = int(np.searchsorted(self._bins.cumsum(), share * self.count))
        return min(self.max, (min(at, BINS - 1) + 1) * BIN)

    def curve(self) -> list[float]:
        """Every percentile from 0 to 100, for plots."""
        return [self.quantile(percent / 100) for percent in range(101)]


async def watch_lateness(
    into: Callable[[], Lateness], busy: Callable[[], Lateness] | None = None
) -> None:
    """Sleep a millisecond at a time, and add how late that was to what `into()` was before it. Runs
    until it is cancelled.

    `busy()`, likewise, is given what the loop's thread computed during each sleep. That bounds a
    turn of the loop from above, without what the machine did for other programs and threads.
    """
    while True:
        late, computed = into(), None if busy is None else busy()
        due, spent = time.perf_counter() + PERIOD, time.thread_time()
        await anyio.sleep(PERIOD)
        late.add((time.perf_counter() - due) * 1e3)
        if computed is not None:
            computed.add((time.thread_time() - spent) * 1e3)
