"""`Timeline`: how time passes in a simulated life."""

from __future__ import annotations

from typing import TYPE_CHECKING

from asyncinfer.testing.invariants import InvariantError
from asyncinfer.testing.simulator.loop import VirtualLoop

if TYPE_CHECKING:
    from asyncinfer.testing.simulator.life import Life

__all__ = ["Timeline"]


class Timeline:
    """Gives event loops and threads their turns, in the order in which they are due."""

    def __init__(self, life: Life) -> None:
        self._life = life

    def pass_time(self, seconds: float, late: VirtualLoop | None = None) -> None:
        """Everybody runs as they are due, but for suspended threads and a loop that is late."""
        life, host = self._life, self._life.host
        until = host.now + seconds
        while not life.failed:
            self.run_due(late)
            later = until
            for actor in host.actors:
                if actor.due < later and not actor.suspended:
                    later = actor.due
            for loop in life.loops:
                if loop.next_timer < later and loop is not late:
                    later = loop.next_timer
            later = max(host.now, later)
            life.checks.late()
            life.state.go_on(later)
            if late is not None:
                life.state.late = host.now
            if later >= until:
                break
        self.run_due(late)

    def run_due(self, late: VirtualLoop | None = None) -> None:
        """Everybody who is due has a turn, until nobody is."""
        life, host = self._life, self._life.host
        for _ in range(10_000):
            for loop in life.loops:
                if loop is not late:
                    host.blocked = 0.0
                    loop.run_ready()
            now, due = host.now, []
            for actor in host.actors:
                if actor.suspended:
                    continue
                if actor.due <= now:
                    due.append(actor)
                elif actor.worker.ready and (actor.name != "decode" or not self._steps()):
                    # What a step takes keeps the decode thread from its next turn, news or not.
                    due.append(actor)
            if not due:
                return
            for actor in due:
                if not actor.ended:
                    host.run(actor)
                    if actor.name == "decode" and self._steps():
                        actor.due = host.now + life.scenario.step_seconds
        raise InvariantError("I9: the engine's threads never rest")

    def _steps(self) -> bool:
        core = self._life.engine.core
        return core is not None and core.busy
