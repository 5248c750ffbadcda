"""Observers in a simulated life: each notes what it is told that it should not be, and some of them
misbehave."""

from __future__ import annotations

from collections.abc import Callable
from typing import ClassVar, Final, Literal

from asyncinfer.protocols import (
    EngineEnded,
    EngineOpened,
    EventsDropped,
    FirstToken,
    Observer,
    ObserverEvent,
    RequestEnded,
    RequestPreempted,
    RequestStarted,
    RequestSubmitted,
    StepTaken,
)
from asyncinfer.testing.simulator.host import VirtualHost

__all__ = ["OBSERVERS", "WatchingObserver"]

#: What a request must have been told of before an event, and is after it.
_ORDER: Final[dict[type, tuple[tuple[str | None, ...], str | None]]] = {
    RequestSubmitted: ((None,), "submitted"),
    RequestStarted: (("submitted",), "started"),
    FirstToken: (("started",), "answered"),
    RequestPreempted: (("started", "answered"), None),
    RequestEnded: (("submitted", "started", "answered"), "ended"),
}


class WatchingObserver(Observer):
    """Knows the order of events that `asyncinfer.protocols.observer` promises."""

    every_step = True
    #: Whether it hears of everything, as it is never retired.
    sound: ClassVar[bool] = True

    def __init__(self, host: VirtualHost) -> None:
        self._host = host
        #: What was wrong.
        self.problems: list[str] = []
        #: How often it was opened, told of the end, and closed.
        self.opened = self.ended = self.closed = 0
        #: By request, the last thing that it was told of it.
        self.last: dict[str, str | None] = {}

    def observe(self, event: ObserverEvent) -> None:
        self._note(not self.ended and not self.closed, event, "after the end")
        self._note(self._host.begin <= event.time <= self._host.now, event, "of another time")
        match event:
            case EngineOpened():
                self._note(not self.opened, event, "twice")
                self.opened += 1
            case EngineEnded():
                self.ended += 1
            case StepTaken() | EventsDropped():
                pass
            case _:
                before, after = _ORDER[type(event)]
                last = self.last.get(event.request_id)
                self._note(last in before, event, f"after {last!r}")
                self.last[event.request_id] = after or last
        self._note(self.opened == 1, event, "before the beginning")

    def close(self) -> None:
        self.closed += 1

    @property
    def unended(self) -> list[str]:
        """Requests whose end it was not told of."""
        return [id for id, last in self.last.items() if last != "ended"]

    def __repr__(self) -> str:
        # Without an address, by which two lives of one seed would fail differently.
        return f"<{type(self).__name__}>"

    def _note(self, right: bool, event: ObserverEvent, what: str) -> None:
        if not right:
            self.problems.append(f"{type(event).__name__} {what}: {event}")


class _OnDecode(WatchingObserver):
    thread: ClassVar[Literal["own", "decode"]] = "decode"


class _PausingObserver(WatchingObserver):
    """Others run while it is called, perhaps for long."""

    def observe(self, event: ObserverEvent) -> None:
        super().observe(event)
        self._host.point(inside=self.thread == "decode")


class _PausingOnDecode(_PausingObserver):
    thread: ClassVar[Literal["own", "decode"]] = "decode"
    sound = False


class _RaisingObserver(WatchingObserver):
    """Gives up in the middle."""

    sound = False

    def observe(self, event: ObserverEvent) -> None:
        super().observe(event)
        if len(self.last) > 3:
            raise SystemExit


class _RaisingOnDecode(_RaisingObserver):
    thread: ClassVar[Literal["own", "decode"]] = "decode"


#: By the name that scenarios have for them.
OBSERVERS: Final[dict[str, Callable[[VirtualHost], WatchingObserver]]] = {
    "(watching)": WatchingObserver,
    "(watching on decode)": _OnDecode,
    "(pausing)": _PausingObserver,
    "(pausing on decode)": _PausingOnDecode,
    "(raising)": _RaisingObserver,
    "(raising on decode)": _RaisingOnDecode,
}
