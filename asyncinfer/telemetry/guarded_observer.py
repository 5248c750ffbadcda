"""`GuardedObserver`: calls one observer, so that its faults harm nobody else."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from time import perf_counter
from typing import Final

from asyncinfer.plugins.supervision import Limits, PluginFault, Supervisor
from asyncinfer.protocols import Observer, ObserverEvent
from asyncinfer.telemetry.log import plugin_reporter

__all__ = ["DECODE_THREAD", "OWN_THREAD", "GuardedObserver"]

#: An observer that raises in so many calls of one method in a row is not called again.
STRIKES: Final = 3
OWN_THREAD: Final = Limits(raised=STRIKES)
DECODE_THREAD: Final = Limits(seconds=0.001, debt=1.0, raised=STRIKES)


class GuardedObserver:
    """Calls an observer. Nothing it raises leaves this class; each kind of fault is reported
    once."""

    def __init__(
        self,
        observer: Observer,
        label: str,
        limits: Limits = OWN_THREAD,
        clock: Callable[[], float] = perf_counter,
    ) -> None:
        self.label: Final = label
        self._observer = observer
        self._supervisor = Supervisor(
            label,
            limits,
            consequence="it is not called any more",
            report=plugin_reporter("asyncinfer.observers"),
            clock=clock,
        )

    @property
    def retired(self) -> bool:
        """Whether the observer is not told of events any more."""
        return self._supervisor.retired is not None

    def tell(self, event: ObserverEvent) -> None:
        """Hand on an event, unless the observer is retired."""
        if self._supervisor.retired is None:
            with suppress(PluginFault):
                self._supervisor.call(self._observer, "observe", event)

    def close(self) -> None:
        """Close the observer, also one that is retired."""
        with suppress(PluginFault):
            self._supervisor.call(self._observer, "close")

    def report(self, what: str) -> None:
        """Log a fault if it is the first of its kind, which is the text before the colon."""
        self._supervisor.fault(what)
