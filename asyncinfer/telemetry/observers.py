"""`Observers`: those of one engine, told of one event after the other."""

from __future__ import annotations

import time
from collections.abc import Iterable
from typing import Final

from asyncinfer.errors import PluginError
from asyncinfer.protocols import EngineEnded, Observer, ObserverEvent, StepTaken
from asyncinfer.telemetry.guarded_observer import DirectObserver, GuardedObserver
from asyncinfer.telemetry.observer_thread import ObserverThread

__all__ = ["Observers"]

#: Seconds that closing waits for all observers together.
PATIENCE: Final = 1.0


class Observers:
    """Tells observers, each on its thread; `start` starts the threads.

    Args:
        observers: each with what messages call it. One that asks for a thread there is not is a
            `PluginError`.
    """

    def __init__(self, observers: Iterable[tuple[Observer, str]]) -> None:
        self._threads: list[ObserverThread] = []
        self._direct: list[DirectObserver] = []
        self._of_steps: list[ObserverThread | DirectObserver] = []
        self._guarded: list[GuardedObserver] = []
        for observer, label in observers:
            its: ObserverThread | DirectObserver
            guarded = GuardedObserver(observer, label)
            self._guarded.append(guarded)
            thread = getattr(observer, "thread", "own")
            if thread == "own":
                its = ObserverThread(guarded)
                self._threads.append(its)
            elif thread == "decode":
                its = DirectObserver(guarded)
                self._direct.append(its)
            else:
                raise PluginError(f"{label}: thread={thread!r}: must be 'own' or 'decode'")
            if getattr(observer, "every_step", False):
                self._of_steps.append(its)

    def discard(self) -> None:
        """Close all, instead of starting them."""
        for guarded in self._guarded:
            guarded.close()

    @property
    def every_step(self) -> bool:
        """Whether any of them wants to be told of steps."""
        return bool(self._of_steps)

    def start(self) -> None:
        for its in self._threads:
            its.start()

    def tell(self, event: ObserverEvent) -> None:
        """Tell all. Decode thread; never raises, never waits for a thread."""
        self.tell_threads(event)
        for its in self._direct:
            its.tell(event)

    def tell_threads(self, event: ObserverEvent) -> None:
        """`tell` while the decode thread hangs, perhaps in an observer."""
        for its in self._threads:
            its.tell(event)

    def tell_step(self, event: StepTaken) -> None:
        """Tell those that want to be told of steps."""
        for its in self._of_steps:
            its.tell(event)

    def close_threads(self, last: EngineEnded) -> None:
        """Let the threads come to their end, and wait for none."""
        for its in self._threads:
            its.close(last)

    def close(self, last: EngineEnded) -> None:
        """Tell `last` and close all; wait a second at most for what is queued."""
        self.close_threads(last)
        for direct in self._direct:
            direct.tell(last)
            direct.close()
        until = time.monotonic() + PATIENCE
        for its in self._threads:
            its.join(max(0.0, until - time.monotonic()))
