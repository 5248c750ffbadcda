"""`Watchdog`: keeps the engine's promises while a step runs, however long it takes."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import replace
from threading import Event
from typing import Final

from asyncinfer.engine.admission import Admission
from asyncinfer.engine.core import Core
from asyncinfer.engine.end_errors import closed, too_late
from asyncinfer.engine.inbox import Command
from asyncinfer.engine.loop_bridge import send_news
from asyncinfer.engine.request import End, Phase, Request
from asyncinfer.engine.stream_buffer import Outcome

__all__ = ["Watchdog"]

#: Seconds that the decode thread has to end a request in time itself, in order with its tokens.
GRACE: Final = 0.02
#: Seconds between two looks at the decode thread, at most.
LOOK_EVERY: Final = 1.0


class Watchdog:
    """A worker beside the decode thread that runs no model, no plugin and no log handler.

    It ends the requests that are out of time while the decode thread is busy, and finds out
    whether that hangs: `on_hang` is called, once, when a turn took longer than `step_timeout`.
    """

    name = "asyncinfer-watchdog"

    def __init__(
        self,
        core: Core,
        admission: Admission,
        step_timeout: float,
        clock: Callable[[], float],
        on_hang: Callable[[], None],
    ) -> None:
        self._core = core
        self._admission = admission
        self._step_timeout = step_timeout
        self._clock = clock
        self._on_hang = on_hang
        self._look_every = min(LOOK_EVERY, step_timeout / 4)
        self._news = Event()
        self._over = False
        self._looked = clock()
        #: When the turn began that ran at the last look, and for how long it was seen to run.
        self._turn: float | None = None
        self._seen = 0.0
        admission.on_deadline = self._news.set

    @property
    def ready(self) -> bool:
        return self._news.is_set()

    def turn(self) -> float | None:
        self._news.clear()
        if self._over:
            return None
        now = self._clock()
        if self.hangs(now):
            self._on_hang()
            return None
        self._end(self._admission.overdue(now - GRACE), now)
        drain_until = self._admission.drain_until
        draining = drain_until is not None and now >= drain_until + GRACE
        if draining:
            self._close(self._admission.untold())
        due = self._admission.deadlines.next
        if drain_until is not None and not draining:
            due = min(due, drain_until)
        return min(now + self._look_every, max(now + 1e-3, due + GRACE))

    def wait(self, seconds: float) -> None:
        self._news.wait(seconds)

    def notice(self) -> None:
        """Look again, since a closing engine has a new time to end requests at."""
        self._news.set()

    def stop(self) -> None:
        """End the watchdog: there is nothing to supervise any more."""
        self._over = True
        # Dropped, since it refers to the decode thread, and so to the model.
        self._on_hang = _nothing
        self._news.set()

    def hangs(self, now: float) -> bool:
        # A look counts two of its intervals at most. In a process that was stopped, or on a machine
        # that slept, the decode thread had no chance to go on.
        passed = min(now - self._looked, 2 * self._look_every)
        self._looked = now
        turn, self._turn = self._turn, self._core.turn_began
        if self._turn is None:
            return False
        self._seen = self._seen + passed if self._turn == turn else min(now - self._turn, passed)
        return self._seen > self._step_timeout

    def _end(self, requests: Iterable[Request], now: float) -> None:
        self._tell((request, End.FAILED, too_late(request, now)) for request in requests)

    def _close(self, requests: Iterable[Request]) -> None:
        self._tell((request, End.CLOSED, closed(request)) for request in requests)

    def _tell(self, ends: Iterable[tuple[Request, End, BaseException]]) -> None:
        told: dict[Request, Outcome] = {}
        for request, how, error in ends:
            # The decode thread may be held up between ending a request and telling its consumer.
            told[request] = self._admission.end(request, how, error) or _instead(
                request.outcome, error
            )
        send_news((request.buffer, outcome) for request, outcome in told.items())
        self._admission.told(told)
        for request in told:
            if request.phase is Phase.TAKEN:
                self._core.post(Command.RELEASE, request)


def _nothing() -> None: ...


def _instead(outcome: Outcome | None, error: BaseException) -> Outcome:
    """A request's outcome, with the error in place of its own."""
    return Outcome(error) if outcome is None else replace(outcome, error=error)
