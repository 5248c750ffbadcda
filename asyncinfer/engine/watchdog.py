"""`Watchdog` keeps deadlines and closes on time while a step runs, however long that takes."""

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
#: The most seconds between two looks at the decode thread.
LOOK_EVERY: Final = 1.0
#: How long a close waits for a call into a plugin, and the time between two looks at that call. A
#: step of the model may take longer: its memory is in use.
CLOSE_SECONDS: Final = 1.0
LOOK_CLOSELY: Final = 0.1


class Watchdog:
    """A worker beside the decode thread that runs no model, no plugin and no log handler.

    It ends the requests that are out of time while the decode thread is busy, and finds out
    whether that hangs: `on_hang` is called with the reason, once, when a turn took longer than
    `step_timeout`, or when a plugin keeps a close from its end for longer than `CLOSE_SECONDS`.

    Args:
        call: the call into a plugin that the decode thread is in, a value that differs for the next
            one; None while it is in none.
    """

    name = "asyncinfer-watchdog"

    def __init__(
        self,
        core: Core,
        admission: Admission,
        step_timeout: float,
        clock: Callable[[], float],
        on_hang: Callable[[str], None],
        call: Callable[[], object],
    ) -> None:
        self._core = core
        self._admission = admission
        self._step_timeout = step_timeout
        self._clock = clock
        self._on_hang = on_hang
        self._call = call
        self._look_every = min(LOOK_EVERY, step_timeout / 4)
        self._news = Event()
        self._over = False
        self._looked = clock()
        #: When the turn began that ran at the last look, and for how long it was seen to run.
        self._turn: float | None = None
        self._seen = 0.0
        #: The call that a close waited for at the last look, and for how long it was seen to do so.
        self._awaited: object = None
        self._waited = 0.0
        admission.on_deadline = self._news.set

    @property
    def ready(self) -> bool:
        return self._news.is_set()

    def turn(self) -> float | None:
        self._news.clear()
        if self._over:
            return None
        now, before = self._clock(), self._looked
        if self.hangs(now):
            self._on_hang(f"a step ran longer than {self._step_timeout:g} s")
            return None
        closing = self._closes(now)
        if closing and self._is_held_up(now - before):
            self._on_hang(f"a plugin's call kept a close waiting for {CLOSE_SECONDS:g} s")
            return None
        self._end(self._admission.overdue(now - GRACE), now)
        drain_until = self._admission.drain_until
        draining = drain_until is not None and now >= drain_until + GRACE
        if draining:
            self._close(self._admission.untold())
        due = self._admission.deadlines.next
        if drain_until is not None and not draining:
            due = min(due, drain_until)
        every = min(self._look_every, LOOK_CLOSELY) if closing else self._look_every
        if self._turn is not None:
            # A hang is found out when it becomes one, and not at the look after.
            every = min(every, self._step_timeout - self._seen + 1e-3)
        return min(now + every, max(now + 1e-3, due + GRACE))

    def wait(self, seconds: float) -> None:
        self._news.wait(seconds)

    def notice(self) -> None:
        """Look again, since a closing engine has a new time to end requests at."""
        self._news.set()

    def stop(self) -> None:
        """End the watchdog: there is nothing to supervise any more."""
        self._over = True
        # Dropped, because they refer to the decode thread and so to the model.
        self._on_hang = self._call = _nothing
        self._news.set()

    def hangs(self, now: float) -> bool:
        # A look counts at most two of its intervals. In a process that was stopped, or on a machine
        # that slept, the decode thread had no chance to go on.
        passed = min(now - self._looked, 2 * self._look_every)
        self._looked = now
        turn, self._turn = self._turn, self._core.turn_began
        if self._turn is None:
            return False
        self._seen = self._seen + passed if self._turn == turn else min(now - self._turn, passed)
        return self._seen > self._step_timeout

    def _closes(self, now: float) -> bool:
        """Whether a close now waits for the decode thread alone, and for no request."""
        drain_until = self._admission.drain_until
        return drain_until is not None and (now >= drain_until or self._core.done)

    def _is_held_up(self, passed: float) -> bool:
        """Whether a call into a plugin has kept a close waiting for too long. `passed`: seconds
        since the last look, of which at most two intervals count, as in `hangs`."""
        call, before = self._call(), self._awaited
        self._awaited = call
        same = call is not None and call == before
        self._waited = self._waited + min(passed, 2 * LOOK_CLOSELY) if same else 0.0
        return self._waited > CLOSE_SECONDS

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


def _nothing(*_: object) -> None: ...


def _instead(outcome: Outcome | None, error: BaseException) -> Outcome:
    """A request's outcome, with the error in place of its own."""
    return Outcome(error) if outcome is None else replace(outcome, error=error)
