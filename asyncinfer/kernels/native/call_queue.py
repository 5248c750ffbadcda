"""`CallQueue`: recorded calls that are made one after the other, also while Python waits for the
GIL."""

from __future__ import annotations

import ctypes
import errno
import functools
import threading
import weakref
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any, Final, NamedTuple

import numpy as np
import numpy.typing as npt

from asyncinfer.kernels.dispatch import CannotRecord
from asyncinfer.kernels.native.arena import aligned
from asyncinfer.kernels.native.calls import team
from asyncinfer.kernels.native.recorded_calls import RecordedCalls
from asyncinfer.kernels.native.team_code import FIELDS, JOB_FIELDS, QUEUE_FIELDS

__all__ = ["CallQueue", "JobTimes"]

I64 = npt.NDArray[np.int64]

_THREADS: Final = FIELDS.index("threads")
#: Bytes of a semaphore: no C library for Linux takes more.
_SEMAPHORE: Final = 64
_LATER: Final = np.iinfo(np.int64).max


class JobTimes(NamedTuple):
    """When calls were made, in seconds: what they took, for how much of it a thread had no core on
    average, and when they were done on the clock of `time.perf_counter`."""

    seconds: float
    away: float
    ended: float


class _Job(NamedTuple):
    """A job that is not finished: its place, the number of its threads, and all that these use."""

    place: int
    threads: int
    needed: object


class CallQueue:
    """Threads make the calls of one job together, and then those of the next. They are in native
    code from one job to the next, and so never wait for the GIL. None of them waits at the end of
    a job for one that has lost its core. A queue is used by one thread.

    Args:
        size: jobs that are not finished, at most.
        threads: those that a job may take.
        begin: what each thread does first.
    """

    def __init__(self, size: int, threads: int, begin: Callable[[], object]) -> None:
        """Raises `CannotRecord` where the system has no such queue, and `RuntimeError` where it has
        no thread left."""
        serve = team().serve
        #: `JOB_FIELDS`, and what tells that a job is done.
        self._jobs: I64 = aligned(size * len(JOB_FIELDS), np.int64).reshape(size, -1)
        self._done = [_Semaphore() for _ in range(size)]
        self._left: deque[_Job] = deque()
        #: How many came, and how many of them are made.
        self._number = 0
        self._made: I64 = aligned(1, np.int64)
        self._made[:] = 0
        #: When the last job was done, in nanoseconds.
        self._before = 0
        self._rings: list[_Ring] = []
        self._threads: list[threading.Thread] = []
        #: Ends the threads when all jobs are done, where nobody calls `close`. Not at exit, when a
        #: decode thread may still put jobs.
        self._forgotten = weakref.finalize(self, _end, self._rings)
        self._forgotten.atexit = False
        kept = self._jobs, self._made, self._done, self._left
        for _ in range(threads):
            ring = _Ring(size)
            given = begin, serve, ring, kept
            thread = threading.Thread(target=_serve, args=given, daemon=True)
            thread.start()
            self._rings.append(ring)
            self._threads.append(thread)

    def put(self, calls: RecordedCalls, threads: int, longest: int, needed: object) -> None:
        """Have the calls made after all others, as `RecordedCalls.replay` does. The same calls may
        not be among those that are not finished. `needed`: what they read and write, and does not
        refer to this queue, since its threads keep it until the job is finished."""
        number, task = self._number, calls.task(threads, longest)
        place, threads = number % len(self._jobs), int(task[_THREADS])
        assert len(self._left) < len(self._jobs)
        job, done = self._jobs[place], self._done[place].address
        made = self._made.ctypes.data
        job[:] = (task.ctypes.data, threads, done, _LATER, _LATER, 0, number, made)
        self._number += 1
        self._left.append(_Job(place, threads, (calls, task, needed)))
        for ring in self._rings[:threads]:
            ring.put(job.ctypes.data)

    def finish(self) -> JobTimes:
        """Wait until the oldest job is done."""
        place, threads, _ = self._left[0]
        self._done[place].wait()
        self._left.popleft()
        _, _, _, began, ended, away, _, _ = self._jobs[place].tolist()
        seconds, self._before = ended - max(began, self._before), ended
        return JobTimes(seconds / 1e9, away / threads / 1e9, ended / 1e9)

    def close(self) -> None:
        """Wait until all jobs are done, and for the end of the threads."""
        if self._forgotten.detach() is not None:
            _end(self._rings)
        for thread in self._threads:
            thread.join()


def _serve(begin: Callable[[], object], serve: Any, ring: _Ring, kept: object) -> None:
    """A thread. It keeps its arguments."""
    begin()
    serve(ring.address)


def _end(rings: Sequence[_Ring]) -> None:
    for ring in rings:
        ring.put(0)


class _Ring:
    """The jobs that a thread has to make, in memory that native code reads."""

    def __init__(self, size: int) -> None:
        self._waiting = _Semaphore()
        # One more for the end.
        self._jobs: I64 = np.zeros(size + 1, np.int64)
        places = {
            "ring": self._jobs.ctypes.data,
            "waiting": self._waiting.address,
            "size": len(self._jobs),
        }
        self._queue = np.array([places[name] for name in QUEUE_FIELDS], np.int64)
        self._place = 0

    @property
    def address(self) -> int:
        """What native code serves."""
        return self._queue.ctypes.data

    def put(self, job: int) -> None:
        """Add a job by its address, or the end: 0."""
        self._jobs[self._place] = job
        self._place = (self._place + 1) % len(self._jobs)
        self._waiting.post()


class _Semaphore:
    """The C library's, which native code can use as well."""

    __slots__ = ("_memory", "address")

    def __init__(self) -> None:
        self._memory = ctypes.create_string_buffer(_SEMAPHORE)
        self.address = ctypes.addressof(self._memory)
        if semaphore_functions().init(self.address, 0, 0):
            raise CannotRecord("the system has no semaphores within a process")

    def post(self) -> None:
        semaphore_functions().post(self.address)

    def wait(self) -> None:
        functions = semaphore_functions()
        if functions.try_wait(self.address):
            while functions.wait(self.address):
                # A signal came before.
                assert ctypes.get_errno() == errno.EINTR


class _Functions(NamedTuple):
    """Those of semaphores. All but `wait` come back at once, and so keep the GIL."""

    init: Any
    post: Any
    try_wait: Any
    wait: Any


@functools.cache
def semaphore_functions() -> _Functions:
    """Those of the C library. Raises `AttributeError` where it has none."""
    here, released = ctypes.PyDLL(None), ctypes.CDLL(None, use_errno=True)
    found = _Functions(here.sem_init, here.sem_post, here.sem_trywait, released.sem_wait)
    found.init.argtypes = ctypes.c_void_p, ctypes.c_int, ctypes.c_uint
    for each in (found.post, found.try_wait, found.wait):
        each.argtypes = (ctypes.c_void_p,)
    return found
