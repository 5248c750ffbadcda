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

#: Events that wait at most; steps are many and large, and go first.
MOST_EVENTS: Final = 16_384
MOST_STEPS: Final = 1_024
#: Seconds between two wake-ups: each takes the GIL from the decode thread.
TURN: Final = 0.02
#: Seconds after which a thread that only runs Python gives the GIL away of itself; CPython would
#: take it after five milliseconds.
BURST: Final = 0.0005
BREATH: Final = 50e-6


class ObserverThread:
    """Hands events to an observer on a daemon thread of its own, in bursts."""

    def __init__(self, guarded: GuardedObserver) -> None:
        self.guarded = guarded
        #: None is the end.
        self._queue: SimpleQueue[ObserverEvent | None] = SimpleQueue()
        self._closing = Event()
        self._dropped = 0
        #: Of those, what the observer was not told of yet.
        self._untold = 0
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
            self._untold += 1
            self.guarded.report("is too slow: events are dropped")
            return
        if self._untold and waiting < MOST_STEPS // 2:
            self._tell_dropped(event.time)
        self._queue.put(event)

    def close(self, last: EngineEnded) -> None:
        """Have the observer told what is queued and `last`, and closed; `join` waits for it."""
        if self._untold:
            self._tell_dropped(last.time)
        self._queue.put(last)
        self._queue.put(None)
        self._closing.set()

    def stop(self) -> None:
        """Have the observer closed, told of nothing more."""
        self._queue.put(None)
        self._closing.set()

    def join(self, timeout: float) -> None:
        """Wait for the thread; one that does not end in time is nobody's any more."""
        self._thread.join(timeout)
        if self._dropped:
            emit("events_dropped", observer=self.guarded.label, count=self._dropped)
        if self._thread.is_alive():
            self.guarded.report(f"is left behind: it did not end in {timeout:.1f} s")

    def _tell_dropped(self, now: float) -> None:
        self._queue.put(EventsDropped(now, self._untold))
        self._untold = 0

    def _run(self) -> None:
        while self._hand_over():
            self._closing.wait(TURN)
        self.guarded.close()

    def _hand_over(self) -> bool:
        """Wait for an event, then hand over all there are; whether more may come."""
        event = self._queue.get()
        breathed = time.perf_counter()
        while event is not None:
            self.guarded.tell(event)
            if self._queue.empty():
                return True
            if time.perf_counter() - breathed > BURST:
                time.sleep(BREATH)
                breathed = time.perf_counter()
            event = self._queue.get()
        return False
