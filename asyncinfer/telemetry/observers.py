"""`Observers`: all observers of one engine."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from contextlib import suppress
from typing import Final

from asyncinfer.errors import PluginError
from asyncinfer.plugins.supervision import read_attribute
from asyncinfer.protocols import EngineEnded, Observer, ObserverEvent, StepTaken
from asyncinfer.runtime import Runtime
from asyncinfer.telemetry.direct_observer import DirectObserver
from asyncinfer.telemetry.guarded_observer import DECODE_THREAD, GuardedObserver
from asyncinfer.telemetry.observer_thread import ObserverThread

__all__ = ["Observers"]

#: Seconds that a close waits for all observers, and for one in which no call returns.
CLOSE_SECONDS: Final = 1.5
HANGS_SECONDS: Final = 1.0
#: Looks at an observer in that time, since its last call may return just after a look.
LOOKS: Final = 8


class Observers:
    """Tells observers of events, each on the thread that it asks for.

    Args:
        observers: each with its name for messages. One that asks for a thread other than "own" and
            "decode" is a `PluginError`.
        runtime: where their threads come from, and the time that their calls take.
    """

    def __init__(self, observers: Iterable[tuple[Observer, str]], runtime: Runtime) -> None:
        self._runtime = runtime
        self._threads: list[ObserverThread] = []
        self._direct: list[DirectObserver] = []
        self._receivers: list[ObserverThread | DirectObserver] = []
        self._of_steps: list[ObserverThread | DirectObserver] = []
        #: Whether `abandon` told of the end: the decode thread has nothing more to tell.
        self._abandoned = False
        for observer, label in observers:
            receiver: ObserverThread | DirectObserver
            thread = read_attribute(observer, "thread", "own", label)
            if thread == "own":
                guarded = GuardedObserver(observer, label, clock=runtime.clock)
                receiver = ObserverThread(guarded, runtime)
                self._threads.append(receiver)
            elif thread == "decode":
                guarded = GuardedObserver(observer, label, DECODE_THREAD, runtime.clock)
                receiver = DirectObserver(guarded)
                self._direct.append(receiver)
            else:
                raise PluginError(f"{label}: thread={thread!r}: must be 'own' or 'decode'")
            self._receivers.append(receiver)
            if read_attribute(observer, "every_step", False, label):
                self._of_steps.append(receiver)

    def discard(self) -> None:
        """Close all observers without an event, each on its thread if that runs."""
        for receiver in self._receivers:
            if isinstance(receiver, ObserverThread) and receiver.alive:
                receiver.stop()
            else:
                receiver.guarded.close()

    @property
    def every_step(self) -> bool:
        """Whether any observer wants to be told of steps."""
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

    def tell(self, *events: ObserverEvent) -> None:
        """Tell all observers of events. Decode thread only; never raises, never waits for a
        thread."""
        if self._abandoned:
            return
        # All of them hear of it before one is called here, which may hang.
        for receiver in self._receivers:
            for event in events:
                receiver.tell(event)
        for direct in self._direct:
            direct.hand_over()

    def tell_step(self, event: StepTaken) -> None:
        """Tell the observers with `every_step` of a step."""
        if self._abandoned:
            return
        for receiver in self._of_steps:
            receiver.tell(event)
        for direct in self._direct:
            direct.hand_over()

    def abandon(self, ends: Iterable[ObserverEvent], last: EngineEnded) -> None:
        """Tell all observers how everything ended and close them, while the decode thread hangs,
        perhaps in one of them. Any other thread; waits for nothing.

        Those of the decode thread get a thread each. Where none can be started, they hear of it
        when the decode thread goes on.
        """
        self._abandoned = True
        for event in ends:
            for receiver in self._receivers:
                receiver.tell(event)
        for receiver in self._receivers:
            receiver.close(last)
        for direct in self._direct:
            with suppress(RuntimeError):
                self._runtime.start(direct)

    def close(self, last: EngineEnded, on_told: Callable[[], object] = bool) -> None:
        """Tell all observers of `last`, unless they were told, close them, call `on_told`, and wait
        for queued events: `CLOSE_SECONDS` at most, `HANGS_SECONDS` for one that hangs."""
        if not self._abandoned:
            for receiver in self._receivers:
                receiver.close(last)
        for direct in self._direct:
            direct.hand_over()
        on_told()
        self._wait()
        for thread in self._threads:
            thread.report()

    def _wait(self) -> None:
        """Wait for each thread until it ends or hangs."""
        clock, left = self._runtime.clock, CLOSE_SECONDS
        #: How many looks in a row saw no call return.
        busy = dict.fromkeys(self._threads, 0)
        while busy and left > 0:
            returned = {thread: thread.returned for thread in busy}
            seconds = min(left, HANGS_SECONDS / LOOKS)
            left -= seconds
            look = clock() + seconds
            for thread in busy:
                thread.join(max(0.0, look - clock()))
            quiet = {
                thread: 0 if thread.returned > returned[thread] else looks + 1
                for thread, looks in busy.items()
            }
            busy = {one: looks for one, looks in quiet.items() if one.alive and looks < LOOKS}
