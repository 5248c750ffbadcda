"""`Timeline`: how time passes in a simulated life."""

from __future__ import annotations

from collections.abc import Callable

from asyncinfer.testing.invariants import InvariantError
from asyncinfer.testing.simulator.checks import Checks
from asyncinfer.testing.simulator.loop import VirtualLoop
from asyncinfer.testing.simulator.world import World

__all__ = ["Timeline"]


class Timeline:
    """Gives event loops and threads their turns, in the order in which they are due."""

    def __init__(self, world: World, checks: Checks, failed: Callable[[], bool]) -> None:
        """`failed` returns whether a check failed, after which time need not pass."""
        self._world = world
        self._checks = checks
        self._failed = failed

    def pass_time(self, seconds: float, late: VirtualLoop | None = None) -> None:
        """All loops and threads run as they are due, except suspended threads and a late loop."""
        world, host = self._world, self._world.host
        until = host.now + seconds
        while not self._failed():
            self.run_due(late)
            later = until
            for actor in host.actors:
                if actor.due < later and not actor.suspended:
                    later = actor.due
            for loop in world.loops:
                if loop.next_timer < later and loop is not late:
                    later = loop.next_timer
            later = max(host.now, later)
            self._checks.late()
            world.state.go_on(later)
            if late is not None:
                world.state.late = host.now
            if later >= until:
                break
        self.run_due(late)

    def run_due(self, late: VirtualLoop | None = None) -> None:
        """Give turns to everybody who is due, until nobody is."""
        world, host = self._world, self._world.host
        for _ in range(10_000):
            for loop in world.loops:
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
                    # A step keeps the decode thread from its next turn for as long as it takes.
                    due.append(actor)
            if not due:
                return
            for actor in due:
                if not actor.ended:
                    host.run(actor)
                    if actor.name == "decode" and self._steps():
                        actor.due = host.now + world.scenario.step_seconds
        raise InvariantError("I9: the engine's threads never rest")

    def _steps(self) -> bool:
        core = self._world.engine.core
        return core is not None and core.busy
