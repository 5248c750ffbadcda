"""`LifeState`: what a simulation knows of its engine and of time, beside what the engine says."""

from __future__ import annotations

from asyncinfer.testing.simulator.host import VirtualHost
from asyncinfer.testing.simulator.scenario import Scenario

__all__ = ["FOUND_OUT", "LifeState"]

#: What finding out that a step hangs may take beyond `step_timeout`, as a share of it.
FOUND_OUT = 0.75


class LifeState:
    """Times are seconds of the host's clock."""

    def __init__(self, host: VirtualHost, scenario: Scenario) -> None:
        self._host = host
        self._step_timeout = scenario.step_timeout
        self.opened = False
        self.closing = False
        self.dead = False
        #: Whether the runner broke, and the decode thread has told nobody.
        self._broke = False
        #: Whether the watchdog may have declared a death.
        self.doubtful = False
        #: When a close or a death ends all answers; inf while open.
        self.over = float("inf")
        #: Seconds that passed while everybody could run, and when they last did not.
        self.fair = 0.0
        self.jumped = host.now
        #: Each stop of the process, and how long it lasted.
        self.jumps: list[tuple[float, float]] = []
        #: When an event loop was last late, so that tasks on it were told late.
        self.late = host.now
        #: Whether the decode thread is in the middle of a turn.
        self.hangs = False
        #: When the turn began that was interrupted last, as the watchdog sees it.
        self._turn: float | None = None
        #: Seconds of this turn that the watchdog must count.
        self._hung = 0.0
        #: Further seconds that the watchdog may count, in which it or the process was stopped.
        self._doubt = 0.0

    def suspend_decode(self, turn: float | None) -> None:
        """The decode thread is interrupted in the turn that began then; None while it opens."""
        if turn is None or turn != self._turn:
            # What passes in one turn adds up.
            self._turn, self._hung, self._doubt = turn, 0.0, 0.0
        self.hangs = True

    def resume_decode(self) -> None:
        """The decode thread's turn continues."""
        self.hangs = False

    def jump(self, seconds: float) -> None:
        """The process was stopped: time went on without anybody."""
        self.jumps.append((self._host.now, seconds))
        if self.hangs:
            self._doubt += self._at_most(seconds)
            self._look()
        self._host.now += seconds
        self.jumped = self._host.now

    def go_on(self, later: float) -> None:
        """Time goes on, and everybody could have run."""
        host = self._host
        if self._broke and not self.hangs:
            self.die()
        passed, host.now = later - host.now, later
        suspended = [actor.name for actor in host.actors if actor.suspended]
        if not suspended:
            self.fair += passed
        elif "watchdog" in suspended or (self.hangs and self.opened and self._turn is None):
            # The watchdog calls nothing that blocks for so long, and neither does the decode thread
            # before it notes the begin of a turn.
            self.jumped = later
        if self.hangs and self.opened:
            if "watchdog" in suspended:
                self._doubt += self._at_most(passed)
            else:
                self._hung += passed
            self._look()
            if self._hung > self._step_timeout * (1 + FOUND_OUT) and later > self.jumped:
                self.die()

    def _look(self) -> None:
        """A watchdog that looks now may find that the turn hangs."""
        if self._hung + self._doubt > self._step_timeout:
            self.doubtful = True

    def _at_most(self, seconds: float) -> float:
        """What the watchdog may count of a time in which it did not look: two looks at most."""
        return min(seconds, self._step_timeout / 2)

    def die(self) -> None:
        """From now on everybody must hear that the engine is dead."""
        self.dead, self._broke = True, False
        self.over = min(self.over, self._host.now)

    def broke(self) -> None:
        """The runner broke: everybody must hear of it once the decode thread can tell them."""
        self.dead = self._broke = True

    def close(self, when: float) -> None:
        """The engine closes, and whoever still waits then hears of it."""
        self.closing = True
        self.over = min(self.over, when)
