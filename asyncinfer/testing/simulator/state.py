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
        #: Whether the watchdog may have declared a death.
        self.doubtful = False
        #: When nobody can be answered any more: the drain of a close, a death. inf while open.
        self.over = float("inf")
        #: Seconds that passed while everybody could run, and when they last did not.
        self.fair = 0.0
        self.jumped = host.now
        #: Every such moment, and for how long nobody ran.
        self.jumps: list[tuple[float, float]] = []
        #: Fair seconds that the decode thread has been in the middle of a turn.
        self._hung: float | None = None
        #: From when to when it was.
        self._interrupted: list[tuple[float, float]] = []
        #: As many that the watchdog may count besides, because the process was stopped.
        self._doubt = 0.0

    @property
    def hangs(self) -> bool:
        """Whether the decode thread is in the middle of a turn."""
        return self._hung is not None

    def suspend_decode(self) -> None:
        """The decode thread is interrupted in its turn."""
        self._hung, self._doubt = 0.0, 0.0
        self._interrupted.append((self._host.now, float("inf")))

    def resume_decode(self) -> None:
        """It goes on."""
        self._hung = None
        self._interrupted[-1] = self._interrupted[-1][0], self._host.now

    def was_interrupted(self, when: float) -> bool:
        """Whether the decode thread was in the middle of a turn then."""
        return any(begin <= when <= end for begin, end in self._interrupted)

    def jump(self, seconds: float) -> None:
        """The process was stopped: time went on without anybody."""
        self.jumps.append((self._host.now, seconds))
        if self._hung is not None:
            # Two looks of the watchdog count at most.
            self._doubt += min(seconds, self._step_timeout / 2)
        self._host.now += seconds
        self.jumped = self._host.now

    def go_on(self, later: float) -> None:
        """Time goes on, and everybody could have run."""
        host = self._host
        passed, host.now = later - host.now, later
        suspended = [actor.name for actor in host.actors if actor.suspended]
        if not suspended:
            self.fair += passed
        elif "watchdog" in suspended:
            # It calls nothing that could hold it up so long.
            self.jumped = later
        if self._hung is not None and self.opened:
            self._hung += passed
            timeout = self._step_timeout
            self.doubtful = self.doubtful or self._hung + self._doubt > timeout
            if self._hung > timeout * (1 + FOUND_OUT) and later > self.jumped:
                self.die()

    def die(self) -> None:
        """From now on everybody must hear that the engine is dead."""
        if not self.dead:
            self.dead = True
            self.over = min(self.over, self._host.now)

    def close(self, when: float) -> None:
        """The engine closes, and whoever still waits then hears of it."""
        self.closing = True
        self.over = min(self.over, when)
