"""The resources of a process: memory, threads, file descriptors, tasks."""

from __future__ import annotations

import asyncio
import ctypes
import gc
import os
import resource
import sys
import threading
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import anyio

__all__ = ["Holdings", "in_use_mib", "kept_mib", "rss_mib", "settled"]

_STATM: Final = Path("/proc/self/statm")
_DESCRIPTORS: Final = Path("/proc/self/fd")
_MIB: Final = 2**20


@dataclass(frozen=True, slots=True)
class Holdings:
    """Counts that must not be higher after an engine than before it."""

    threads: int
    #: None where the system does not list them.
    descriptors: int | None
    #: Tasks of the calling event loop.
    tasks: int

    @classmethod
    def now(cls) -> Holdings:
        """The counts of this process. Call it on an event loop."""
        return cls(threading.active_count(), _descriptors(), _tasks())

    def beyond(self, before: Holdings) -> dict[str, int]:
        """How many more of each than `before`; 0 where there are fewer."""
        descriptors = (self.descriptors or 0) - (before.descriptors or 0)
        return {
            "threads": max(0, self.threads - before.threads),
            "descriptors": max(0, descriptors),
            "tasks": max(0, self.tasks - before.tasks),
        }


async def settled(before: Holdings, seconds: float = 10.0) -> dict[str, int]:
    """What is held beyond `before` once nothing more of it goes away, `seconds` at most: a thread
    that has done its last work still takes a moment to end."""
    until = time.monotonic() + seconds
    while True:
        gc.collect()
        left = Holdings.now().beyond(before)
        if not any(left.values()) or time.monotonic() > until:
            return left
        await anyio.sleep(0.02)


def rss_mib() -> float:
    """Memory that is resident now; where the system does not say, the most there ever was."""
    try:
        pages = int(_STATM.read_text().split()[1])
    except OSError:
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        return peak / _MIB if sys.platform == "darwin" else peak / 1024
    return pages * resource.getpagesize() / _MIB


class _Mallinfo(ctypes.Structure):
    """`struct mallinfo2` of glibc 2.33 and later."""

    _fields_ = [
        (name, ctypes.c_size_t)
        for name in (
            "arena",
            "ordblks",
            "smblks",
            "hblks",
            "hblkhd",
            "usmblks",
            "fsmblks",
            "uordblks",
            "fordblks",
            "keepcost",
        )
    ]


def in_use_mib() -> float | None:
    """Memory that was taken from malloc and not given back, of all threads: RSS without what the
    allocator keeps for later. None where it is not glibc's."""
    found = _mallinfo()
    return None if found is None else float(found.uordblks + found.hblkhd) / _MIB


def kept_mib() -> float | None:
    """Memory that was given back to malloc, which keeps it for later, of all threads. Some of it
    may not be resident. None where it is not glibc's."""
    found = _mallinfo()
    return None if found is None else float(found.fordblks) / _MIB


def _mallinfo() -> _Mallinfo | None:
    try:
        mallinfo = ctypes.CDLL(None).mallinfo2
    except (AttributeError, OSError):
        return None
    mallinfo.restype = _Mallinfo
    found: _Mallinfo = mallinfo()
    return found


def _descriptors() -> int | None:
    try:
        return len(os.listdir(_DESCRIPTORS))
    except OSError:
        return None


def _tasks() -> int:
    trio = sys.modules.get("trio")
    if trio is not None and trio.lowlevel.in_trio_task():
        return int(trio.lowlevel.current_statistics().tasks_living)
    return len(asyncio.all_tasks())
