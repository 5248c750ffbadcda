"""`GuardedObserver`: one observer, called so that its faults are its own."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Final

from asyncinfer.protocols import Observer, ObserverEvent
from asyncinfer.telemetry.log import emit

__all__ = ["DirectObserver", "GuardedObserver"]

GROUP: Final = "asyncinfer.observers"
#: Calls in a row that raised before an observer is called no more.
STRIKES: Final = 3
#: Seconds that a call on the decode thread may take, and that an observer may owe in all.
ALLOWED: Final = 0.001
TOO_LATE: Final = 1.0


class GuardedObserver:
    """Calls an observer. Whatever it raises stays here; each kind of fault is reported once."""

    def __init__(self, observer: Observer, label: str) -> None:
        self.label: Final = label
        #: It is not called any more.
        self.quarantined = False
        self._observer = observer
        self._strikes = 0
        self._reported: set[str] = set()

    def observe(self, event: ObserverEvent) -> None:
        """Hand on an event, unless the observer is quarantined."""
        if self.quarantined:
            return
        try:
            self._observer.observe(event)
        # An observer that leaves by sys.exit() must not end the host.
        except (Exception, SystemExit) as error:
            self.report(f"observe() raised: {error!r} at {type(event).__name__}")
            self._strikes += 1
            if self._strikes >= STRIKES:
                self.quarantine(f"observe() raised {STRIKES} times in a row")
        else:
            self._strikes = 0

    def close(self) -> None:
        """The last call."""
        try:
            self._observer.close()
        except (Exception, SystemExit) as error:
            self.report(f"close() raised: {error!r}")

    def quarantine(self, why: str) -> None:
        self.quarantined = True
        self.report(f"is not called any more: {why}")

    def report(self, what: str) -> None:
        """Log a fault if it is the first of its kind, which is what stands before the colon."""
        kind = what.partition(":")[0]
        if kind not in self._reported:
            self._reported.add(kind)
            emit("plugin_failed", group=GROUP, error=f"{self.label}: {what}")


class DirectObserver:
    """An observer that is called where things happen, on the decode thread.

    A call may take `ALLOWED` seconds; what it takes beyond is a debt that later calls pay off with
    what they leave. One that owes `TOO_LATE` seconds is not called again.
    """

    def __init__(
        self, guarded: GuardedObserver, clock: Callable[[], float] = time.perf_counter
    ) -> None:
        self._guarded = guarded
        self._clock = clock
        self._debt = 0.0

    def tell(self, event: ObserverEvent) -> None:
        if self._guarded.quarantined:
            return
        began = self._clock()
        self._guarded.observe(event)
        self._debt = max(0.0, self._debt + self._clock() - began - ALLOWED)
        if self._debt > TOO_LATE:
            late = f"its calls took {self._debt:.1f} s more than {ALLOWED * 1e3:g} ms each"
            self._guarded.quarantine(f"it is too slow for the decode thread, {late}")

    def close(self) -> None:
        self._guarded.close()
