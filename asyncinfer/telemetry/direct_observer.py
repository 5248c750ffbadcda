"""`DirectObserver`: an observer that is called by whoever has news for it."""

from __future__ import annotations

from contextlib import suppress
from queue import Empty, SimpleQueue
from threading import Lock

from asyncinfer.protocols import EngineEnded, ObserverEvent
from asyncinfer.telemetry.guarded_observer import GuardedObserver

__all__ = ["DirectObserver"]


class DirectObserver:
    """Queues the events of an observer and hands them over one call at a time.

    The decode thread hands over what it has told at once. Where that thread hangs, a thread of its
    own takes the turn: if the observer is what hangs, the turn ends at once, and whoever is in the
    call hands over the rest when it returns.
    """

    name = "asyncinfer-observer"
    ready = False

    def __init__(self, guarded: GuardedObserver) -> None:
        self.guarded = guarded
        #: None closes the observer. A decode thread that is given up may tell events after it.
        self._queue: SimpleQueue[ObserverEvent | None] = SimpleQueue()
        #: Held by whoever calls the observer. Nobody waits for it.
        self._calling = Lock()
        self._closed = False

    def tell(self, event: ObserverEvent) -> None:
        """Queue an event. Any thread; calls nothing."""
        self._queue.put(event)

    def close(self, last: EngineEnded) -> None:
        """Queue the last event and the observer's end. Any thread; calls nothing."""
        self._queue.put(last)
        self._queue.put(None)

    def hand_over(self) -> None:
        """Call the observer for all that is queued, unless another thread is at it."""
        # Again after the release: the other thread may have queued something just before.
        while not (self._closed or self._queue.empty()) and self._calling.acquire(blocking=False):
            try:
                with suppress(Empty):
                    while not self._closed:
                        event = self._queue.get_nowait()
                        if event is None:
                            self._closed = True
                            self.guarded.close()
                        else:
                            self.guarded.tell(event)
            finally:
                self._calling.release()

    def turn(self) -> float | None:
        self.hand_over()
        return None

    def wait(self, seconds: float) -> None: ...
