"""`Owner`: the task around a simulated engine, `async with engine: ...`."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

from asyncinfer.errors import AsyncInferError

if TYPE_CHECKING:
    from asyncinfer.testing.simulator.life import Life

__all__ = ["Owner"]


class Owner:
    """Holds the engine open until it is told to leave."""

    def __init__(self, life: Life) -> None:
        self._life = life
        self._leave = asyncio.Event()
        self._clean = True
        self.task = life.loops[0].create_task(self._own())

    def leave(self, clean: bool) -> None:
        """The block ends by itself, or by an exception."""
        self._clean = clean
        self._leave.set()
        if self._life.state.opened:
            self._life.state.closing = True

    def cancel(self) -> None:
        """Perhaps while the engine drains or opens."""
        if not self.task.done():
            self.task.cancel()
            self._life.state.close(self._life.host.now)

    async def _own(self) -> None:
        life, outcome = self._life, "closed"
        try:
            async with life.engine:
                life.state.opened = True
                life.checks.opened()
                await self._leave.wait()
                drain = life.scenario.drain_timeout if self._clean else 0.0
                life.state.close(life.host.now + drain)
                life.closers[self.task] = life.checks.close_due(drain)
                if not self._clean:
                    raise ZeroDivisionError
        except asyncio.CancelledError:
            outcome = "cancelled"
        except (ZeroDivisionError, RuntimeError, AsyncInferError) as error:
            outcome = type(error).__name__
        life.seen[f"owner: {outcome}"] += 1
        life.state.close(life.host.now)
