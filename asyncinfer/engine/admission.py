"""Every request that an engine holds, from its submission to its end.

A consumer waits for its request until one of six things happens:

- an answer: `Requests.finish`;
- a failure of its own, such as NaN logits or a reader that stalls: `Requests.fail`;
- its deadline: `Requests.expire`, and `Watchdog` where the decode thread is late;
- a close: `Frontend.drain`, then `Requests.expire`, and `Watchdog` likewise;
- the death of the engine: `Core.fail_all`, or `Core.abandon` where a step hangs;
- its own cancellation: `Command.ABORT`.

Each of them goes through `Admission.end`, which lets the first one through and no other. An invalid
request has not begun to wait when `Admission.refuse` forgets it.
"""

from __future__ import annotations

import math
import time
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import replace
from threading import RLock

from asyncinfer.engine.deadlines import Deadlines
from asyncinfer.engine.request import End, Phase, Request
from asyncinfer.engine.stream_buffer import Outcome
from asyncinfer.errors import AsyncInferError, EngineClosed, InvalidRequest, Overloaded, Size
from asyncinfer.scheduler import SequenceState
from asyncinfer.stats import EngineStats
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
        #: Answers among them whose requests the decode thread has not taken over.
        self.pending = 0
        self.refused = 0
        #: Requests by how they ended. The decode thread counts those that it ends.
        self.ends: dict[End, int] = dict.fromkeys(End, 0)
        #: When a close ends what still runs, in seconds of the clock; None while open.
        self.drain_until: float | None = None
        #: Called when a deadline becomes the next one.
        self.on_deadline: Callable[[], None] = _nothing
        self._clock = clock
        # Reentrant for the methods below. None of the engine's finalizers takes it, nor any other
        # lock: two threads, each holding what a finalizer on the other one wants, would wait for
        # ever.
        self._lock = RLock()
        #: Requests that have a place.
        self._places: dict[Request, None] = {}
        #: Requests in `_places` that have ended, but that the decode thread still counts.
        self._still_counted: dict[Request, None] = {}
        #: Requests whose consumer may not have been told of an end.
        self._untold: dict[Request, None] = {}
        #: The deadlines that no consumer was told of yet.
        self.deadlines = Deadlines()
        self._over: Callable[[], AsyncInferError] | None = None

    def check(self) -> None:
        """Raises `EngineClosed` or `EngineDead` where no request can be taken any more."""
        if self._over is not None:
            raise self._over()
        if self.drain_until is not None:
            raise EngineClosed("the engine is closing")

    def enter(self, request: Request) -> None:
        """Give a request its place, and charge it what it holds already. Raises `Overloaded`,
        `InvalidRequest` where it holds more than all may, and as `check` does."""
        answers = request.params.n
        with self._lock:
            self.check()
            refusal = self._lacks_places(answers) or self._lacks_bytes(request.held_bytes)
            if refusal is None:
                self.held_bytes += request.held_bytes
                self.held += answers
                self.pending += answers
                self._places[request] = None
                self._untold[request] = None
                if request.deadline is not None:
                    first = request.deadline < self.deadlines.next
                    self.deadlines.add(request)
                    if first:
                        self.on_deadline()
                return
        try:
            raise self._refused(refusal)
        finally:
            # Its traceback refers to frames that hold the request.
            del refusal

    def charge(self, request: Request, count: int) -> None:
        """Charge so many bytes more to a request, unless it has ended. Raises as `enter` does."""
        with self._lock:
            if request.end is not None or request not in self._places:
                return
            refusal = self._lacks_bytes(count, request.held_bytes)
            if refusal is None:
                self.held_bytes += count
                request.held_bytes += count
                return
        try:
            raise self._refused(refusal)
        finally:
            # Its traceback refers to frames that hold the request.
            del refusal

    def _lacks_places(self, answers: int) -> Overloaded | None:
        if self.held + answers <= self.limit:
            return None
        return Overloaded(
            f"max_requests={self.limit}: {self.held} answers are held, {answers} more were asked "
            "for; try again later"
        )

    def _lacks_bytes(self, count: int, before: int = 0) -> Overloaded | InvalidRequest | None:
        """Why a request that holds `before` bytes may not hold `count` more; None if it may."""
        if self.held_bytes + count <= self.max_bytes:
            return None
        bound = f"max_held_bytes={self.max_bytes}"
        if before + count > self.max_bytes:
            return InvalidRequest(
                "prompt", Size(f"{before + count} bytes held"), f"must be <= {bound}"
            )
        return Overloaded(
            f"{bound}: requests hold {self.held_bytes} bytes, {count} more were asked for; "
            "try again later"
        )

    def advance(self, request: Request, phase: Phase) -> bool:
        """Let a request go on to its next phase; False if it has ended."""
        with self._lock:
            if request.end is not None:
                return False
            request.phase = phase
            return True

    def complete(self, stats: EngineStats) -> EngineStats:
        """The decode thread's last snapshot, with what other threads have counted since. A request
        that the watchdog ended neither runs nor waits, even before the decode thread notices."""
        with self._lock:
            over = Counter(state for each in self._still_counted for state in each.states)
            return replace(
                stats,
                running=max(0, stats.running - over[SequenceState.RUNNING]),
                waiting=max(0, stats.waiting + self.pending - over[SequenceState.WAITING]),
                paused=max(0, stats.paused - over[SequenceState.PAUSED]),
                aborted=stats.aborted + self.ends[End.ABORTED],
                failed=stats.failed + self.ends[End.FAILED],
                refused=self.refused,
                held_bytes=self.held_bytes,
            )

    def took(self, answers: int) -> None:
        """The scheduler's own counters now include `answers` more: they are pending no longer."""
        with self._lock:
            self.pending -= answers

    def end(
        self, request: Request, how: End, error: BaseException | None, *, counted: bool = False
    ) -> Outcome | None:
        """End a request. Returns its consumer's outcome; None if it has ended before.
        `counted`: the caller counts the end."""
        with self._lock:
            if request.end is not None:
                return None
            request.end = how
            request.outcome = request.summary(self._clock(), error)
            self.ends[how] += not counted
            # The decode thread itself stops counting the requests that it ends.
            if request in self._places and not (counted and request.phase is Phase.TAKEN):
                self._still_counted[request] = None
            return request.outcome

    def withdraw(self, request: Request, error: AsyncInferError | None = None) -> Outcome | None:
        """End a request that is being prepared: aborted, or closed with `error`. Returns its
        outcome; None if its preparation or the request itself has ended."""
        how = End.ABORTED if error is None else End.CLOSED
        with self._lock:
            return self.end(request, how, error) if request.phase is Phase.PREPARING else None

    def told(self, requests: Iterable[Request]) -> None:
        """These requests' ends are on the way to their consumers: their deadlines count no more."""
        with self._lock:
            for request in requests:
                self._untold.pop(request, None)
                self.deadlines.discard(request)

    def leave(self, request: Request) -> None:
        """Free the request's place, and give back the bytes that it was charged: the caller has
        ended it, or found that it is not wanted any more. The pages that a step in flight still
        writes are `SequenceStates`' until that step is committed."""
        with self._lock:
            if request not in self._places:
                return
            del self._places[request]
            self._still_counted.pop(request, None)
            self.held -= request.params.n
            self.held_bytes -= request.held_bytes
            if request.phase is not Phase.TAKEN:
                self.pending -= request.params.n
        if request.adapter is not None:
            # Outside of the lock, since this takes the adapter registry's lock.
            request.adapter.release()

    def refuse(self, request: Request) -> bool:
        """Forget a request that its preparation found invalid; False, and nothing is done, if it
        has ended."""
        with self._lock:
            if request.end is not None:
                return False
            request.end = End.REFUSED
            self.told((request,))
        self.leave(request)
        return True

    def overloaded(self, request: Request, error: Overloaded) -> None:
        """Forget a request that no worker thread could prepare, and count it as refused."""
        if self.refuse(request):
            self._refused(error)

    def claim_report(self, request: Request) -> bool:
        """Whether the caller reports the end to log and observers: true for the first one."""
        with self._lock:
            first, request.reported = not request.reported, True
            return first

    def overdue(self, now: float) -> list[Request]:
        """Requests whose deadline has passed and whose consumer may not have been told."""
        if self.deadlines.next > now:
            return []
        with self._lock:
            return self.deadlines.due(now)

    def untold(self) -> list[Request]:
        """All requests whose consumer may not have been told of an end."""
        with self._lock:
            return list(self._untold)

    def drain(self, until: float) -> list[Request]:
        """Take no request from now on, and end at `until` what still runs. A second close may be
        more impatient than the first, not less. Returns what the decode thread does not have yet.
        """
        with self._lock:
            before = math.inf if self.drain_until is None else self.drain_until
            self.drain_until = min(before, until)
            return [request for request in self._untold if request.phase is Phase.PREPARING]

    def close(self, error: Callable[[], AsyncInferError]) -> list[Request]:
        """Raise `error()` for every request from now on. Returns those that are to be told."""
        with self._lock:
            self._over = self._over or error
            return list(self._untold)

    def clear(self) -> list[Request]:
        """The engine has ended, and all were told: no place is taken any more. Returns the
        requests that had one."""
        with self._lock:
            held = list(self._places)
            self._places.clear()
            self._still_counted.clear()
            self._untold.clear()
            self.deadlines = Deadlines()
            self.held = self.pending = self.held_bytes = 0
            return held

    def _refused(self, error: Overloaded | InvalidRequest) -> Overloaded | InvalidRequest:
        """Count and log a refusal for overload; returns the error. Called without the lock: a log
        handler may block, and the watchdog needs the lock to keep deadlines."""
        if isinstance(error, Overloaded):
            with self._lock:
                self.refused += 1
            emit("request_refused", reason=str(error))
        return error


def _nothing() -> None: ...
