"""`Observers`: all observers of one engine."""

from __future__ import annotations

import time
from collections.abc import Iterable
from typing import Final

from asyncinfer.errors import PluginError
from asyncinfer.plugins.supervision import read_attribute
from asyncinfer.protocols import EngineEnded, Observer, ObserverEvent, StepTaken
from asyncinfer.telemetry.guarded_observer import DECODE_THREAD, GuardedObserver
from asyncinfer.telemetry.observer_thread import ObserverThread

__all__ = ["Observers"]

#: Seconds that a close waits for all observers together.
CLOSE_SECONDS: Final = 1.0


class Observers:
    """Tells observers of events, each on the thread that it asks for.

    Args:
        observers: each with its name for messages. One that asks for a thread other than "own" and
            "decode" is a `PluginError`.
    """

    def __init__(self, observers: Iterable[tuple[Observer, str]]) -> None:
        self._threads: list[ObserverThread] = []
        self._running: list[ObserverThread] = []
        self._direct: list[GuardedObserver] = []
        self._of_steps: list[ObserverThread | GuardedObserver] = []
        self._guarded: list[GuardedObserver] = []
        for observer, label in observers:
            receiver: ObserverThread | GuardedObserver
            thread = read_attribute(observer, "thread", "own", label)
            if thread == "own":
                guarded = GuardedObserver(observer, label)
                receiver = ObserverThread(guarded)
                self._threads.append(receiver)
            elif thread == "decode":
                receiver = guarded = GuardedObserver(observer, label, DECODE_THREAD)
                self._direct.append(receiver)
            else:
                raise PluginError(f"{label}: thread={thread!r}: must be 'own' or 'decode'")
            self._guarded.append(guarded)
            if read_attribute(observer, "every_step", False, label):
                self._of_steps.append(receiver)

    def discard(self) -> None:
        """Close all observers without an event; those whose threads run, on these."""
        for thread in self._running:
            thread.stop()
        running = [thread.guarded for thread in self._running]
        for guarded in self._guarded:
            if guarded not in running:
                guarded.close()

    @property
    def every_step(self) -> bool:
        """Whether any of them wants to be told of steps."""
        return bool(self._of_steps)

    def start(self) -> None:
        """Start the threads. Raises `PluginError` where one cannot be started; then call
        `discard`."""
        for thread in self._threads:
            try:
                thread.start()
            except RuntimeError as error:
                label = thread.guarded.label
                raise PluginError(f"{label}: its thread cannot be started: {error}") from error
            self._running.append(thread)

    def tell(self, event: ObserverEvent) -> None:
        """Tell all. Decode thread; never raises, never waits for a thread."""
        self.tell_threads(event)
        for direct in self._direct:
            direct.tell(event)

    def tell_threads(self, event: ObserverEvent) -> None:
        """Tell only observers on threads of their own: the decode thread hangs, perhaps in one of
        the others."""
        for thread in self._threads:
            thread.tell(event)

    def tell_step(self, event: StepTaken) -> None:
        """Tell those that want to be told of steps."""
        for receiver in self._of_steps:
            receiver.tell(event)

    def close_threads(self, last: EngineEnded) -> None:
        """Have the threads end after `last`, without waiting for them."""
        for thread in self._threads:
            thread.close(last)

    def close(self, last: EngineEnded) -> None:
        """Tell all of `last` and close them; waits at most `CLOSE_SECONDS` for queued events."""
        self.close_threads(last)
        for direct in self._direct:
            direct.tell(last)
            direct.close()
        until = time.monotonic() + CLOSE_SECONDS
        for thread in self._threads:
            thread.join(max(0.0, until - time.monotonic()))
