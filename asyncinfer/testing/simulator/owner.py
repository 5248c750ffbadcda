"""`Owner`: the task around a simulated engine, `async with engine: ...`."""

from __future__ import annotations

import asyncio

from asyncinfer.errors import AsyncInferError
from asyncinfer.testing.simulator.checks import Checks
from asyncinfer.testing.simulator.world import World

__all__ = ["Owner"]


class Owner:
    """Holds the engine open until it is told to leave."""

    def __init__(self, world: World, checks: Checks) -> None:
        self._world = world
        self._checks = checks
        self._leave = asyncio.Event()
        self._clean = True
        self.task = world.loops[0].create_task(self._own())

    def leave(self, clean: bool) -> None:
        """The block ends by itself, or by an exception."""
        self._clean = clean
        self._leave.set()
        if self._world.state.opened:
            self._world.state.closing = True

    def cancel(self) -> None:
        """Perhaps while the engine drains or opens."""
        if not self.task.done():
            self.task.cancel()
            self._world.state.close(self._world.host.now)

    async def _own(self) -> None:
        world, outcome = self._world, "closed"
        try:
            async with world.engine:
                world.state.opened = True
                self._checks.opened()
                await self._leave.wait()
                drain = world.scenario.drain_timeout if self._clean else 0.0
                world.state.close(world.host.now + drain)
                world.closers[self.task] = self._checks.close_due(drain)
                if not self._clean:
                    raise ZeroDivisionError
        except asyncio.CancelledError:
            outcome = "cancelled"
        except (ZeroDivisionError, RuntimeError, AsyncInferError) as error:
            outcome = type(error).__name__
        world.seen[f"owner: {outcome}"] += 1
        world.state.close(world.host.now)
