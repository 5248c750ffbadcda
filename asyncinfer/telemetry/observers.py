"""`Observers`: those of one engine, told of one event after the other."""

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
        self._running: list[ObserverThread] = []
        self._direct: list[GuardedObserver] = []
        self._of_steps: list[ObserverThread | GuardedObserver] = []
        self._guarded: list[GuardedObserver] = []
        for observer, label in observers:
            its: ObserverThread | GuardedObserver
            thread = read_attribute(observer, "thread", "own", label)
            if thread == "own":
                guarded = GuardedObserver(observer, label)
                its = ObserverThread(guarded)
                self._threads.append(its)
            elif thread == "decode":
                its = guarded = GuardedObserver(observer, label, DECODE_THREAD)
                self._direct.append(its)
            else:
                raise PluginError(f"{label}: thread={thread!r}: must be 'own' or 'decode'")
            self._guarded.append(guarded)
            if read_attribute(observer, "every_step", False, label):
                self._of_steps.append(its)

    def discard(self) -> None:
        """Close all, told of nothing; those on threads of their own, if these run, there."""
        for its in self._running:
            its.stop()
        running = [its.guarded for its in self._running]
        for guarded in self._guarded:
            if guarded not in running:
                guarded.close()

    @property
    def every_step(self) -> bool:
        """Whether any of them wants to be told of steps."""
        return bool(self._of_steps)

    def start(self) -> None:
        """Raises `PluginError` where a thread cannot be started; `discard` comes next then."""
        for its in self._threads:
            try:
                its.start()
            except RuntimeError as error:
                label = its.guarded.label
                raise PluginError(f"{label}: its thread cannot be started: {error}") from error
            self._running.append(its)

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
