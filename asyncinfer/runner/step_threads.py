"""`StepThreads`: how many threads a step on a CPU takes beside other programs.

A parallel region ends when its last thread does. Where another program has the core of one, the
others wait for that thread's next turn, some milliseconds, hundreds of times in a step: two
threads are then many times slower than one. So a step takes as many as there are cores free.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable
from math import inf
from typing import Final

import torch

from asyncinfer.kernels.threads import NAME, TASKS, set_thread_count, thread_name
from asyncinfer.machine import busy_seconds, read_lines, running_threads

__all__ = ["StepThreads"]

#: Seconds between looks. The system counts the time of cores in hundredths.
INTERVAL: Final = 0.2
#: A thread more needs so much of another core, and it is given up below half of one. In between
#: the number stays, since a change moves the data of caches.
_WANTED: Final = 0.75
_KEPT: Final = 0.5
#: Where the step's own threads had less than this share of one core since the last look, the
#: engine was idle, and what others took meanwhile says little about now.
_IDLE: Final = 0.5
#: Readings of what runs now, of which the least counts, and the seconds between two: a thread that
#: has just called the engine is about to wait for it.
_READINGS: Final = 3
_BETWEEN: Final = 0.0005


class StepThreads:
    """Follows the cores that other threads leave. Belongs to the thread that computes steps.

    What others take is what all took, less what the step's own threads did: these are known by
    their name, see `name_thread`. The load of a machine or the time that threads wait would not
    tell, since a step's threads wait for each other as well.

    After a time without steps, such as the turn of an agent's tool, a program that was busy may be
    waiting for the engine. So what runs at that moment counts, if it is less.

    Args:
        most: threads that a step takes where nobody else computes.
        cores: cores that the process may run on.
        used: seconds that all threads of the machine have computed on these cores, and those that
            the step's own have; None where the system does not say.
        apply: sets the number of threads for the operators of this thread.
        running: threads of others that run, or could, at this moment; None where the system does
            not say.
    """

    def __init__(
        self,
        most: int,
        cores: int,
        used: Callable[[], tuple[float, float] | None],
        apply: Callable[[int], object],
        running: Callable[[], int | None] = lambda: None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.count = most
        self._most = most
        self._cores = cores
        self._used = used
        self._apply = apply
        self._running = running
        self._clock = clock
        self._looked = clock()
        self._before = used()

    def adapt(self) -> None:
        """Take more threads or fewer, if it is time to look. Called before every step."""
        now = self._clock()
        if now - self._looked >= INTERVAL:
            self._look(now)

    def _look(self, now: float) -> None:
        seconds, self._looked = now - self._looked, now
        before, used = self._before, self._used()
        self._before = used
        if before is None or used is None:
            return
        everybody, own = used[0] - before[0], used[1] - before[1]
        others, count = max(0.0, everybody - own) / seconds, self.count
        if own < _IDLE * seconds and self._cores - others + _KEPT < self._most:
            others = min(others, self._others_now())
        free = self._cores - others
        if free + _KEPT < count:
            count = int(free + _KEPT)
        elif free + 1 - _WANTED >= count + 1:
            count = int(free + 1 - _WANTED)
        count = max(1, min(self._most, count))
        if count != self.count:
            self.count = count
            self._apply(count)

    def _others_now(self) -> float:
        least = inf
        for reading in range(_READINGS):
            if reading:
                time.sleep(_BETWEEN)
            running = self._running()
            if running is None:
                return inf
            least = min(least, running)
            if not least:
                break
        return least

    @classmethod
    def here(cls) -> StepThreads | None:
        """Those of the thread that calls, which `name_thread` has named; None where there is
        nothing to choose or the system does not tell."""
        name = thread_name(threading.get_native_id())
        most = torch.get_num_threads()
        if most < 2 or name is None or not name.startswith(NAME) or not set_thread_count(most):
            return None
        own = _OwnTime(name)
        cores = sorted(os.sched_getaffinity(0))

        def used() -> tuple[float, float] | None:
            everybody, ours = busy_seconds(cores), own.seconds()
            return None if everybody is None or ours is None else (everybody, ours)

        def running() -> int | None:
            # Those of the whole machine: where it has more cores, they say nothing of ours.
            found = running_threads() if len(cores) == os.cpu_count() else None
            return None if found is None else max(0, found - 1)

        if used() is None:
            return None
        return cls(most, len(cores), used, set_thread_count, running)


class _OwnTime:
    """Seconds that threads of one name have computed, those that have ended included."""

    def __init__(self, name: str) -> None:
        self._name = name
        #: Whether each thread of the process has that name.
        self._known: dict[str, bool] = {}
        #: What each that has it had computed when it was last looked at, in nanoseconds.
        self._last: dict[str, int] = {}
        self._total = 0

    def seconds(self) -> float | None:
        """None where the system does not tell."""
        try:
            idents = os.listdir(TASKS)
        except OSError:
            return None
        known, self._known = self._known, {}
        last, self._last = self._last, {}
        for ident in idents:
            ours = known[ident] if ident in known else thread_name(ident) == self._name
            self._known[ident] = ours
            if ours:
                for line in read_lines(TASKS / ident / "schedstat"):
                    computed = self._last[ident] = int(line.split()[0])
                    self._total += max(0, computed - last.get(ident, 0))
        return self._total / 1e9 if self._last else None
