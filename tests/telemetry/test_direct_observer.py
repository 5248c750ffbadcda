"""Observers of the decode thread, told by several threads."""

from __future__ import annotations

import threading

from asyncinfer.protocols import EngineEnded, ObserverEvent
from asyncinfer.runtime import Threads
from asyncinfer.telemetry.observers import Observers


class Hanging:
    """Hangs in the first event until it may go on."""

    thread = "decode"

    def __init__(self) -> None:
        self.reached, self.go_on = threading.Event(), threading.Event()
        self.told: list[ObserverEvent] = []
        self.closed = 0

    def observe(self, event: ObserverEvent) -> None:
        self.told.append(event)
        self.reached.set()
        assert self.go_on.wait(120)

    def close(self) -> None:
        self.closed += 1


def test_an_end_that_two_threads_tell_of_is_told_once() -> None:
    """The decode thread closes, hangs in the observer, and the watchdog gives it up."""
    observer = Hanging()
    observers = Observers([(observer, "hanging")], Threads())
    closed, died = EngineEnded(1.0, None), EngineEnded(2.0, "a step ran too long")
    decode = threading.Thread(target=observers.close, args=(closed,))
    decode.start()
    assert observer.reached.wait(120)
    observers.abandon([], died)
    observer.go_on.set()
    decode.join(120)
    assert not decode.is_alive()
    assert (observer.told, observer.closed) == ([closed], 1)
