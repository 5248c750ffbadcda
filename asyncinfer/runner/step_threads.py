"""`StepThreads`: how many threads a step on a CPU takes beside other programs.

A parallel region ends when its last thread does. Where another program has the core of one, the
others wait for that thread's next turn, some milliseconds, hundreds of times in a step: two
threads are then many times slower than one. So a step takes as many as there are cores free.
"""

from __future__ import annotations

import ctypes
import functools
import os
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Final

import torch

from asyncinfer.machine import busy_seconds, read_lines, usable_cores

__all__ = ["StepThreads", "name_thread", "set_thread_count"]

#: Seconds between looks. The system counts the time of cores in hundredths.
INTERVAL: Final = 0.2
#: A thread more needs so much of another core, and it is given up below half of one. In between
#: the number stays, since a change moves the data of caches.
_WANTED: Final = 0.75
_KEPT: Final = 0.5
#: What the names of threads begin with, on which steps are computed.
_NAME: Final = "asyncinfer-"
_TASKS: Final = Path("/proc/self/task")


class StepThreads:
    """Follows the cores that other threads leave. Belongs to the thread that computes steps.

    What others take is what all took, less what the step's own threads did: these are known by
    their name, see `name_thread`. The load of a machine or the time that threads wait would not
    tell, since a step's threads wait for each other as well.

    Args:
        most: threads that a step takes where nobody else computes.
        cores: cores that the process may run on.
        used: seconds that all threads of the machine have computed on these cores, and those that
            the step's own have; None where the system does not say.
        apply: sets the number of threads for the operators of this thread.
    """

    def __init__(
        self,
        most: int,
        cores: int,
        used: Callable[[], tuple[float, float] | None],
        apply: Callable[[int], object],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.count = most
        self._most = most
        self._cores = cores
        self._used = used
        self._apply = apply
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
        free = self._cores - max(0.0, everybody - own) / seconds
        count = self.count
        if free + _KEPT < count:
            count = int(free + _KEPT)
        elif free + 1 - _WANTED >= count + 1:
            count = int(free + 1 - _WANTED)
        count = max(1, min(self._most, count))
        if count != self.count:
            self.count = count
            self._apply(count)

    @classmethod
    def here(cls) -> StepThreads | None:
        """Those of the thread that calls, which `name_thread` has named; None where there is
        nothing to choose or the system does not tell."""
        name = _name_of(threading.get_native_id())
        most = torch.get_num_threads()
        library = _library()
        if most < 2 or library is None or name is None or not name.startswith(_NAME):
            return None
        own = _OwnTime(name)
        cores = sorted(os.sched_getaffinity(0))

        def used() -> tuple[float, float] | None:
            everybody, ours = busy_seconds(cores), own.seconds()
            return None if everybody is None or ours is None else (everybody, ours)

        if used() is None:
            return None
        return cls(most, usable_cores(), used, set_thread_count)


def name_thread() -> None:
    """Give the thread that calls a name that the system shows. The threads on which torch computes
    its operators get it as well, if it has not begun any. The main thread keeps its own, which is
    that of the process."""
    if threading.current_thread() is threading.main_thread():
        return
    ident = threading.get_native_id()
    try:
        # A name has fifteen bytes.
        (_TASKS / str(ident) / "comm").write_text(f"{_NAME}{ident % 10_000}", "utf-8")
    except OSError:
        # No Linux: nothing tells the step's threads from others.
        return


def set_thread_count(count: int) -> bool:
    """Compute the operators of this thread on `count` threads; whether that can be set.
    `torch.set_num_threads` would also change the number of all threads that have not used torch
    yet."""
    library = _library()
    if library is None:
        return False
    # A thread gets the process's number when it first uses torch, which must not come later.
    torch.get_num_threads()
    library.omp_set_num_threads(count)
    if hasattr(library, "MKL_Set_Num_Threads_Local"):
        library.MKL_Set_Num_Threads_Local(count)
    return True


@functools.cache
def _library() -> ctypes.CDLL | None:
    """What torch is linked with: its OpenMP, and on some processors MKL. None where it has none."""
    path = Path(torch.__file__).parent / "lib" / "libtorch_cpu.so"
    try:
        library = ctypes.CDLL(str(path))
        library.omp_set_num_threads.restype = None
    except (OSError, AttributeError):
        return None
    return library


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
            idents = os.listdir(_TASKS)
        except OSError:
            return None
        known, self._known = self._known, {}
        last, self._last = self._last, {}
        for ident in idents:
            ours = known[ident] if ident in known else _name_of(ident) == self._name
            self._known[ident] = ours
            if ours:
                for line in read_lines(_TASKS / ident / "schedstat"):
                    computed = self._last[ident] = int(line.split()[0])
                    self._total += max(0, computed - last.get(ident, 0))
        return self._total / 1e9 if self._last else None


def _name_of(ident: int | str) -> str | None:
    return next(iter(read_lines(_TASKS / str(ident) / "comm")), None)
