"""`ObserverThread`: an observer, its queue and its thread."""

from __future__ import annotations

import time
from contextlib import suppress
from math import inf
from queue import Empty, SimpleQueue
from threading import Event
from typing import Final

from asyncinfer.protocols import EngineEnded, EventsDropped, ObserverEvent, StepTaken
from asyncinfer.runtime import Handle, Runtime
from asyncinfer.telemetry.guarded_observer import GuardedObserver
from asyncinfer.telemetry.log import emit

__all__ = ["ObserverThread"]

#: Events that are queued at most. Steps are dropped first, since they are many and large.
MOST_EVENTS: Final = 16_384
MOST_STEPS: Final = 1_024
#: Seconds between two wake-ups, since each takes the GIL from the decode thread.
WAKE_SECONDS: Final = 0.02
#: Seconds of handing over after which the thread gives the GIL away by a short sleep; CPython would
#: take it from the thread only after five milliseconds.
BURST_SECONDS: Final = 0.0005
YIELD_SECONDS: Final = 50e-6


class ObserverThread:
    """A worker that hands events to an observer, in bursts."""

    name = "asyncinfer-observer"

    def __init__(self, guarded: GuardedObserver, runtime: Runtime) -> None:
        self.guarded = guarded
        #: Calls of the observer that have returned.
        self.returned = 0
        self._runtime = runtime
        self._thread: Handle | None = None
        #: None ends the thread.
        self._queue: SimpleQueue[ObserverEvent | None] = SimpleQueue()
        #: The entry that woke `wait`, to be handed over first.
        self._woken_by: list[ObserverEvent | None] = []
        #: Whether the thread rests after a burst, so that new events wait for its end.
        self._rests = False
        self._closing = Event()
        self._dropped = 0
        #: How many dropped events the observer was not told of yet.
        self._unreported = 0

    def start(self) -> None:
        """Raises `RuntimeError` if no thread can be started."""
        self._thread = self._runtime.start(self)

    def tell(self, event: ObserverEvent) -> None:
        """Queue an event or drop it. Never blocks. One thread at a time."""
        if self.guarded.retired:
            return
        waiting = self._queue.qsize()
        if waiting >= (MOST_STEPS if isinstance(event, StepTaken) else MOST_EVENTS):
            self._dropped += 1
            self._unreported += 1
            self.guarded.report("is too slow: events are dropped")
            return
        if self._unreported and waiting < MOST_STEPS // 2:
            self._tell_dropped(event.time)
        self._queue.put(event)

    def close(self, last: EngineEnded) -> None:
        """Have the thread hand over what is queued and `last`, then close the observer; `join`
        waits for that."""
        if self._unreported:
            self._tell_dropped(last.time)
        self._queue.put(last)
        self._queue.put(None)
        self._closing.set()

    def stop(self) -> None:
        """Have the thread close the observer, without another event."""
        self._queue.put(None)
        self._closing.set()

    @property
    def alive(self) -> bool:
        """Whether the thread runs."""
        return self._thread is not None and self._thread.is_alive()

    def join(self, timeout: float) -> None:
        """Wait for the thread, at most `timeout` seconds."""
        if self._thread is not None:
            self._thread.join(timeout)

    def report(self) -> None:
        """Log what was dropped, and that the thread is left behind if it runs."""
        if self._dropped:
            emit("events_dropped", observer=self.guarded.label, count=self._dropped)
        if self.alive:
            self.guarded.report("is left behind: it did not end in time")

    def _tell_dropped(self, now: float) -> None:
        self._queue.put(EventsDropped(now, self._unreported))
        self._unreported = 0

    @property
    def ready(self) -> bool:
        rests = self._rests and not self._closing.is_set()
        return not rests and bool(self._woken_by or not self._queue.empty())

    def turn(self) -> float | None:
        """Hand over all events that are queued."""
        clock, told = self._runtime.clock, False
        began = clock()
        with suppress(Empty):
            while True:
                event = self._woken_by.pop() if self._woken_by else self._queue.get_nowait()
                if event is None:
                    self.guarded.close()
                    return None
                self.guarded.tell(event)
                self.returned += 1
                told = True
                if clock() - began > BURST_SECONDS:
                    time.sleep(YIELD_SECONDS)
                    began = clock()
        self._rests = told
        return clock() + WAKE_SECONDS if told else inf

    def wait(self, seconds: float) -> None:
        if self._rests:
            self._closing.wait(seconds)
            return
        with suppress(Empty):
            self._woken_by.append(self._queue.get(timeout=seconds))
