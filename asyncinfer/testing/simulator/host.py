"""`VirtualHost`: the clock and the threads of an engine, in the hands of a simulation."""

from __future__ import annotations

import sys
from asyncio import events
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Final

from asyncinfer.runtime import Worker
from asyncinfer.testing.invariants import hold

__all__ = ["Actor", "VirtualHost"]

#: Where a reading of the clock is a point at which a thread may lose the processor: between two
#: calls of the scheduler and with no lock taken, which is what the simulation may look at.
_POINTS: Final = frozenset(("asyncinfer.engine.core", "asyncinfer.engine.watchdog"))
#: Functions of these modules where it is not: a turn that has not begun, or is over, cannot hang.
_NO_POINTS: Final = frozenset(("idle_until", "step"))
#: Seconds that an event loop may be kept from running.
MOST_BLOCKED: Final = 0.02


class Actor:
    """Stands for a thread, and runs when the simulation says so, a turn at a time."""

    __slots__ = ("due", "ended", "host", "name", "points", "suspended", "worker")

    #: No thread has its stack.
    ident = None

    def __init__(self, host: VirtualHost, worker: Worker) -> None:
        self.host = host
        self.worker = worker
        #: Without the package's name.
        self.name = worker.name.removeprefix("asyncinfer-")
        #: When it wants its next turn, unless it has news before.
        self.due = host.now
        self.ended = False
        #: In the middle of a turn, while others run.
        self.suspended = False
        #: Points that it may still pass before it is suspended; None: all of them.
        self.points: int | None = None

    def is_due(self, now: float) -> bool:
        return not self.suspended and (self.due <= now or self.worker.ready)

    def is_alive(self) -> bool:
        return not self.ended

    def join(self, timeout: float | None = None) -> None:
        """Keeps the caller while the others run, as a thread's does."""
        self.host.block(self, 3600.0 if timeout is None else timeout)


class VirtualHost:
    """A `Runtime`: time, and turns.

    One actor runs at a time. Others run while it does only at points: where it reads the clock, and
    where the model or a plugin is called. A suspended actor lies under those that run meanwhile on
    the Python stack, so it goes on after they have paused or ended.

    `meanwhile` is called at such a point: it runs others until it is the actor's turn again.
    `joining` is called where an actor waits for the end of another one: it runs the others until
    then, or until a time.
    """

    def __init__(
        self,
        meanwhile: Callable[[Actor], None],
        joining: Callable[[Actor, Actor, float], None],
    ) -> None:
        #: Seconds. Nobody but the simulation moves the second.
        self.begin = self.now = 1000.0
        self.actors: list[Actor] = []
        #: So many of the next threads cannot be started.
        self.refused = 0
        #: For how long threads have kept the event loop since it was set to 0.
        self.blocked = 0.0
        #: Actors that are suspended in a call of the scheduler.
        self.inside = 0
        #: How often a turn ended or was interrupted. As long as it is the same, nothing of what
        #: belongs to threads has changed.
        self.turns = 0
        self._meanwhile = meanwhile
        self._joining = joining
        self._stack: list[Actor] = []

    # -- what the engine asks for --------------------------------------------------------------

    def clock(self) -> float:
        """The time before the caller is suspended: a thread may find that its reading is old."""
        now = self.now
        if self._stack and self._stack[-1].points is not None:
            caller = sys._getframe(1)
            if caller.f_globals["__name__"] in _POINTS and caller.f_code.co_name not in _NO_POINTS:
                self.point()
        return now

    def start(self, worker: Worker) -> Actor:
        if self.refused:
            self.refused -= 1
            raise RuntimeError("can't start new thread")
        actor = Actor(self, worker)
        self.actors.append(actor)
        return actor

    # -- what the simulation does --------------------------------------------------------------

    def run(self, actor: Actor, points: int | None = None) -> None:
        """One turn of an actor that is not suspended, or its beginning."""
        assert not actor.suspended
        assert not actor.ended
        actor.points = points
        self._stack.append(actor)
        # It is on no event loop, whoever made it run.
        before = events._get_running_loop()
        events._set_running_loop(None)
        try:
            due = actor.worker.turn()
        finally:
            events._set_running_loop(before)
            self._stack.pop()
            self.turns += 1
        if due is None:
            actor.ended = True
            self.actors.remove(actor)
        else:
            actor.due = due

    def point(self, *, inside: bool = False) -> None:
        """Where whoever runs can be suspended. `inside` a call of the scheduler nothing is to be
        seen of that but that it takes time."""
        if not self._stack or (actor := self._stack[-1]).points is None:
            return
        if actor.points > 0:
            actor.points -= 1
            return
        self.inside += inside
        try:
            with self._suspended(actor):
                self._meanwhile(actor)
        finally:
            self.inside -= inside

    @contextmanager
    def _suspended(self, actor: Actor) -> Iterator[None]:
        actor.points, actor.suspended = None, True
        # Those that run meanwhile have a stack of their own: this actor is not among them.
        stack, self._stack = self._stack, []
        self.turns += 1
        try:
            yield
        finally:
            self._stack = stack
            actor.suspended = False

    def block(self, actor: Actor, seconds: float) -> None:
        """The caller waits for an actor's end; the others go on. An event loop may not wait
        long."""
        until = self.now + seconds
        if self._stack:
            caller = self._stack[-1]
            with self._suspended(caller):
                self._joining(caller, actor, until)
            return
        while not actor.ended and self.now < until:
            for other in [*self.actors]:
                if not other.ended and other.is_due(self.now):
                    self.run(other)
            if not actor.ended:
                dues = [other.due for other in self.actors if not other.suspended]
                later = min([until, *dues])
                self.blocked += max(0.0, later - self.now)
                self.now = max(self.now, later)
        hold("loop", self.blocked <= MOST_BLOCKED, "an event loop waits for a thread")
