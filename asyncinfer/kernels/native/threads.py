"""torch's threads for native code, and whether using them pays at the moment.

A parallel region ends when its last thread does. Where another program has a core, a thread of the
region waits there for its turn, and the region takes milliseconds instead of microseconds.
"""

from __future__ import annotations

import ctypes
import functools
from pathlib import Path

import torch

__all__ = ["ThreadChoice", "ThreadChoices", "parallel_region"]

#: Seconds after which the slower way is tried again: `_SOON` at first, then twice as long each time
#: that it is still slower, up to `_LATE`.
_SOON, _LATE = 0.005, 0.5
#: Weight of one call in the running mean of its way.
_WEIGHT = 1 / 8
#: The most kinds of calls for which a kernel remembers its choice of threads.
_MOST_CHOICES = 1024


@functools.cache
def parallel_region() -> int | None:
    """The address of `GOMP_parallel` in the OpenMP library of torch, whose threads it runs on."""
    library = Path(torch.__file__).parent / "lib" / "libtorch_cpu.so"
    try:
        # A look-up by this handle ends at the library that torch itself is linked with.
        function = ctypes.CDLL(str(library)).GOMP_parallel
    except (OSError, AttributeError):
        return None
    return ctypes.cast(function, ctypes.c_void_p).value


class ThreadChoice:
    """Whether one kind of call is faster now on all threads or on the caller alone. Both ways are
    timed as they are used. Calls at the same time may spoil a measurement, and nothing else."""

    __slots__ = ("_alone", "_next", "_shared", "_wait")

    def __init__(self) -> None:
        # Mean seconds of a call; None: not known.
        self._alone: float | None = None
        self._shared: float | None = None
        self._wait, self._next = _SOON, 0.0

    def shares(self, now: float) -> bool:
        """Whether the call that begins `now` (seconds of any clock) runs on all threads."""
        if self._alone is None or self._shared is None:
            return self._alone is not None
        better = self._shared <= self._alone
        return better if now < self._next else not better

    def took(self, shared: bool, began: float, ended: float) -> None:
        """Note the time of a call that ran on all threads or alone."""
        seconds = ended - began
        if self._alone is None or self._shared is None:
            self._next = ended + self._wait
            self._keep(shared, seconds)
            return
        before = self._shared <= self._alone
        if shared is before:
            mean = self._shared if shared else self._alone
            self._keep(shared, mean + _WEIGHT * (seconds - mean))
            if (self._shared <= self._alone) is not before:
                self._wait, self._next = _SOON, ended + _SOON
            return
        # This was a trial of the slower way, whose old mean says nothing about now.
        self._keep(shared, seconds)
        changed = (self._shared <= self._alone) is not before
        self._wait = _SOON if changed else min(2 * self._wait, _LATE)
        self._next = ended + self._wait

    def _keep(self, shared: bool, mean: float) -> None:
        if shared:
            self._shared = mean
        else:
            self._alone = mean


class ThreadChoices:
    """A `ThreadChoice` for each kind of call of one kernel."""

    __slots__ = ("_found",)

    def __init__(self) -> None:
        # By a matrix's outputs and inputs, and by the bits of the number of rows. A model has few.
        self._found: dict[tuple[int, int, int], ThreadChoice] = {}

    def of(self, outputs: int, inputs: int, rows: int) -> ThreadChoice:
        """Similar numbers of rows share a choice, so that there are few."""
        key = outputs, inputs, rows.bit_length()
        found = self._found.get(key)
        if found is None:
            if len(self._found) >= _MOST_CHOICES:
                self._found.clear()
            found = self._found[key] = ThreadChoice()
        return found
