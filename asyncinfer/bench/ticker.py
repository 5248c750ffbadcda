"""`Ticker`: a task that measures how late its event loop runs it."""

from __future__ import annotations

import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import anyio

__all__ = ["Ticker", "ticking"]


class Ticker:
    """Sleeps `period` seconds at a time; `late` has the lateness of each tick in milliseconds."""

    def __init__(self, period: float = 0.001) -> None:
        self.period = period
        self.late: list[float] = []

    async def run(self) -> None:
        while True:
            due = time.perf_counter() + self.period
            await anyio.sleep(self.period)
            self.late.append((time.perf_counter() - due) * 1e3)


@asynccontextmanager
async def ticking(period: float = 0.001) -> AsyncIterator[Ticker]:
    """A ticker beside the block."""
    ticker = Ticker(period)
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(ticker.run)
        yield ticker
        tasks.cancel_scope.cancel()
