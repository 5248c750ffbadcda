"""Every request that an engine holds, from its submission to its end.

A consumer waits for its request until one of five things happens:

- an answer: `Jobs.finish`, or `InvalidRequest` from `Intake`, before there is anything to wait for;
- its deadline: `Jobs.expire`, and `Watchdog` where the decode thread is late;
- a close: `Frontend.drain`, then `Jobs.expire`, and `Watchdog` likewise;
- the death of the engine: `Core.fail_all`, or `Core.abandon` where a step hangs;
- its own cancellation: `Command.ABORT`.

Each of them goes through `Admission.end`, which lets the first one through and no other.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable
from dataclasses import replace
from threading import RLock

from asyncinfer.chunk import EngineStats
from asyncinfer.engine.deadlines import Deadlines
from asyncinfer.engine.job import End, Job, Phase
from asyncinfer.engine.stream_buffer import Outcome
from asyncinfer.errors import AsyncInferError, EngineClosed, InvalidRequest, Overloaded, Size
from asyncinfer.telemetry import emit

__all__ = ["Admission"]


class Admission:
    """Bounds the requests between submission and end, so that overload is refused at once rather
    than queued, and ends each of them once. Callable from any thread.

    A request takes its place in `enter`. Its consumer is told of its end once `end` gave the
    outcome to whoever asked first. The place is free again (`leave`) when nothing is computed
    for it any more, whether its consumer still waited or not.
    """

    def __init__(
        self, limit: int, max_bytes: int, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self.limit = limit
        self.max_bytes = max_bytes
        #: Charged to the requests that have a place.
        self.held_bytes = 0
        #: Answers asked for by the requests that have a place.
        self.held = 0
        #: Those of them that the decode thread has not taken over.
        self.pending = 0
        self.refused = 0
        #: Requests by how they ended. The decode thread counts those that it ends.
        self.ends: dict[End, int] = dict.fromkeys(End, 0)
        #: When a close ends what still runs, in seconds of the clock; None while open.
        self.drain_until: float | None = None
        #: Called when a deadline becomes the next one.
        self.on_deadline: Callable[[], None] = _nothing
        self._clock = clock
        # Reentrant: the garbage collector may close a coroutine within, which gives a place back.
        self._lock = RLock()
        #: Requests that have a place.
        self._places: dict[Job, None] = {}
        #: Requests whose consumer may not have been told of an end.
        self._untold: dict[Job, None] = {}
        self._deadlines = Deadlines()
        self._over: Callable[[], AsyncInferError] | None = None

    @property
    def next_deadline(self) -> float:
        """The earliest deadline that nobody was told of, in seconds of the clock; inf if none."""
        return self._deadlines.next

    def check(self) -> None:
        """Raises `EngineClosed` or `EngineDead` where no request can be taken any more."""
        if self._over is not None:
            raise self._over()
        if self.drain_until is not None:
            raise EngineClosed("the engine is closing")

    def enter(self, job: Job) -> None:
        """Give a request its place, and charge it what it holds already. Raises `Overloaded`,
        `InvalidRequest` where it holds more than all may, and as `check` does."""
        answers = job.params.n
        with self._lock:
            self.check()
            held = self.held
            if held + answers <= self.limit:
                self._charge(job.held_bytes)
                self.held += answers
                self.pending += answers
                self._places[job] = None
                self._untold[job] = None
                if job.deadline is not None:
                    first = job.deadline < self._deadlines.next
                    self._deadlines.add(job)
                    if first:
                        self.on_deadline()
                return
        reason = (
            f"max_requests={self.limit}: {held} requests are held, {answers} more were asked "
            "for; try again later"
        )
        self._count_refused(reason)
        raise Overloaded(reason)

    def charge(self, job: Job, count: int) -> None:
        """Charge so many bytes more to a request, if it has a place. Raises as `enter` does."""
        with self._lock:
            if job in self._places:
                self._charge(count, job.held_bytes)
                job.held_bytes += count

    def _charge(self, count: int, before: int = 0) -> None:
        if self.held_bytes + count <= self.max_bytes:
            self.held_bytes += count
            return
        bound = f"max_held_bytes={self.max_bytes}"
        if before + count > self.max_bytes:
            raise InvalidRequest(
                "prompt", Size(f"{before + count} bytes held"), f"must be <= {bound}"
            )
        reason = (
            f"{bound}: requests hold {self.held_bytes} bytes, {count} more were asked for; "
            "try again later"
        )
        self._count_refused(reason)
        raise Overloaded(reason)

    def advance(self, job: Job, phase: Phase) -> bool:
        """Let a request go on to its next phase; False if it has ended."""
        with self._lock:
            if job.end is not None:
                return False
            job.phase = phase
            return True

    def complete(self, stats: EngineStats) -> EngineStats:
        """The decode thread's last snapshot, and what other threads have counted since."""
        with self._lock:
            return replace(
                stats,
                waiting=stats.waiting + self.pending,
                aborted=stats.aborted + self.ends[End.ABORTED],
                failed=stats.failed + self.ends[End.FAILED],
                refused=self.refused,
                held_bytes=self.held_bytes,
            )

    def took(self, answers: int) -> None:
        """The scheduler counts so many more answers as waiting."""
        with self._lock:
            self.pending -= answers

    def end(
        self, job: Job, how: End, error: BaseException | None, *, counted: bool = False
    ) -> Outcome | None:
        """End a request. Returns its consumer's outcome; None if it has ended before.
        `counted`: the caller counts the end."""
        with self._lock:
            if job.end is not None:
                return None
            job.end = how
            job.outcome = job.summary(self._clock(), error)
            self.ends[how] += not counted
            return job.outcome

    def withdraw(self, job: Job, error: AsyncInferError | None = None) -> Outcome | None:
        """End a request that is being prepared: aborted, or closed with `error`. Returns its
        outcome; None if its preparation or the request itself has ended."""
        how = End.ABORTED if error is None else End.CLOSED
        with self._lock:
            return self.end(job, how, error) if job.phase is Phase.PREPARING else None

    def told(self, jobs: Iterable[Job]) -> None:
        """The ends of these jobs are on the way to their consumers."""
        with self._lock:
            for job in jobs:
                self._untold.pop(job, None)
                self._deadlines.discard(job)

    def leave(self, job: Job) -> None:
        """Nothing is computed for the request any more: its place is free."""
        with self._lock:
            if job not in self._places:
                return
            del self._places[job]
            self.held -= job.params.n
            self.held_bytes -= job.held_bytes
            if job.phase is not Phase.TAKEN:
                self.pending -= job.params.n

    def refuse(self, job: Job) -> bool:
        """Forget a request that turned out to be none; False, and nothing is done, if it ended."""
        with self._lock:
            if job.end is not None:
                return False
            job.end = End.REFUSED
            self.told((job,))
            self.leave(job)
            return True

    def overloaded(self, job: Job, error: Overloaded) -> None:
        """Forget a request that there was no thread for."""
        if self.refuse(job):
            self._count_refused(str(error))

    def claim_report(self, job: Job) -> bool:
        """Whether the caller reports the end to log and observers: true for the first one."""
        with self._lock:
            first, job.reported = not job.reported, True
            return first

    def overdue(self, now: float) -> list[Job]:
        """Requests whose deadline has passed and whose consumer may not have been told."""
        if self._deadlines.next > now:
            return []
        with self._lock:
            return self._deadlines.due(now)

    def untold(self) -> list[Job]:
        """All requests whose consumer may not have been told of an end."""
        with self._lock:
            return list(self._untold)

    def drain(self, until: float) -> list[Job]:
        """Take no request from now on, and end at `until` what still runs. A second close may be
        more impatient than the first, not less. Returns what the decode thread does not have yet.
        """
        with self._lock:
            before = math.inf if self.drain_until is None else self.drain_until
            self.drain_until = min(before, until)
            return [job for job in self._untold if job.phase is Phase.PREPARING]

    def close(self, error: Callable[[], AsyncInferError]) -> list[Job]:
        """Raise `error()` for every request from now on. Returns those that are to be told."""
        with self._lock:
            self._over = self._over or error
            return list(self._untold)

    def clear(self) -> list[Job]:
        """The engine has ended, and all were told: no place is taken any more. Returns the
        requests that had one."""
        with self._lock:
            held = list(self._places)
            self._places.clear()
            self._untold.clear()
            self._deadlines = Deadlines()
            self.held = self.pending = self.held_bytes = 0
            return held

    def _count_refused(self, reason: str) -> None:
        with self._lock:
            self.refused += 1
        emit("request_refused", reason=reason)


def _nothing() -> None: ...
