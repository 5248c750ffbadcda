"""`ObserverThread`: an observer, its queue and its thread."""

from __future__ import annotations

import time
from queue import SimpleQueue
from threading import Event, Thread
from typing import Final

from asyncinfer.protocols import EngineEnded, EventsDropped, ObserverEvent, StepTaken
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
    """Hands events to an observer on a daemon thread of its own, in bursts."""

    def __init__(self, guarded: GuardedObserver) -> None:
        self.guarded = guarded
        #: None ends the thread.
        self._queue: SimpleQueue[ObserverEvent | None] = SimpleQueue()
        self._closing = Event()
        self._dropped = 0
        #: How many of these the observer was not told of yet.
        self._unreported = 0
        self._thread = Thread(target=self._run, name="asyncinfer-observer", daemon=True)

    def start(self) -> None:
        self._thread.start()

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

    def join(self, timeout: float) -> None:
        """Wait for the thread; one that does not end in time is left behind and reported."""
        self._thread.join(timeout)
        if self._dropped:
            emit("events_dropped", observer=self.guarded.label, count=self._dropped)
        if self._thread.is_alive():
            self.guarded.report(f"is left behind: it did not end in {timeout:.1f} s")

    def _tell_dropped(self, now: float) -> None:
        self._queue.put(EventsDropped(now, self._unreported))
        self._unreported = 0

    def _run(self) -> None:
        while self._hand_over():
            self._closing.wait(WAKE_SECONDS)
        self.guarded.close()

    def _hand_over(self) -> bool:
        """Wait for an event, then hand over all that are queued; gives whether more may come."""
        event = self._queue.get()
        began = time.perf_counter()
        while event is not None:
            self.guarded.tell(event)
            if self._queue.empty():
                return True
            if time.perf_counter() - began > BURST_SECONDS:
                time.sleep(YIELD_SECONDS)
                began = time.perf_counter()
            event = self._queue.get()
        return False
