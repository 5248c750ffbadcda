"""`StepThreads` decides how many threads a step on a CPU uses beside other programs.

A parallel region ends when its last thread does. If another program has the core of one thread, the
others wait some milliseconds for its next turn, hundreds of times in a step: two threads are then
many times slower than one. So a step uses as many threads as there are free cores. Replayed steps
wait less, see `kernels/native/team_code.py`, and still leave a busy program its core.
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

#: Seconds between looks. The system counts cores' time in hundredths of a second.
INTERVAL: Final = 0.2
#: Another thread is added for this much of another free core, and removed below the second share.
#: In between the number stays, since a change moves data between caches.
_WANTED: Final = 0.75
_KEPT: Final = 0.5
#: The same where other threads of a step do the work of one that is not running: two fifths of a
#: core are then worth a thread. A program that is always busy takes two thirds of one from two.
_WANTED_BY_HELPERS: Final = 0.4
_KEPT_BY_HELPERS: Final = 0.35
#: If the step's own threads used less than this share of a core since the last look, the engine was
#: idle, and the time of other programs says little about now.
_IDLE: Final = 0.5
#: Readings of the running threads, of which the least counts, and the seconds between two: a thread
#: that has just called the engine is about to wait for it.
_READINGS: Final = 3
_BETWEEN: Final = 0.0005


class StepThreads:
    """Follows how many cores other threads leave free, for the thread that computes steps.

    The time of other threads is the time of all, less that of the step's own threads, which are
    known by their name: see `name_thread`. A machine's load or waiting times would not do, since a
    step's threads wait for each other as well.

    After a time without steps, such as the run of a tool, a busy program may now wait for the
    engine. Then the threads that run at this moment count, if they are fewer.

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

    def adapt(self, *, helps: bool = False) -> None:
        """Use more threads or fewer, if a look is due. Called before every step. `helps`: whether
        threads of the step do the work of one that is not running."""
        now = self._clock()
        if now - self._looked >= INTERVAL:
            shares = (_WANTED_BY_HELPERS, _KEPT_BY_HELPERS) if helps else (_WANTED, _KEPT)
            self._look(now, *shares)

    def _look(self, now: float, wanted: float, kept: float) -> None:
        seconds, self._looked = now - self._looked, now
        before, used = self._before, self._used()
        self._before = used
        if before is None or used is None:
            return
        everybody, own = used[0] - before[0], used[1] - before[1]
        others, count = max(0.0, everybody - own) / seconds, self.count
        if own < _IDLE * seconds and self._cores - others + 1 - kept < self._most:
            others = min(others, self._others_now())
        free = self._cores - others
        if free + 1 - kept < count:
            count = int(free + 1 - kept)
        elif free + 1 - wanted >= count + 1:
            count = int(free + 1 - wanted)
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
        """`StepThreads` for the calling thread, which `name_thread` has named; None if there is no
        choice, or if the system does not tell."""
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
            # Counts the whole machine: if that has more cores, the number says nothing about ours.
            found = running_threads() if len(cores) == os.cpu_count() else None
            return None if found is None else max(0, found - 1)

        if used() is None:
            return None
        return cls(most, len(cores), used, set_thread_count, running)


class _OwnTime:
    """Seconds that threads of one name have computed, including threads that have ended."""

    def __init__(self, name: str) -> None:
        self._name = name
        #: For each thread of the process, whether it has that name.
        self._known: dict[str, bool] = {}
        #: For each of these threads, its nanoseconds at the last look.
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
