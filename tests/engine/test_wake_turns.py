"""Waking many streams at once leaves the event loop to others in between."""

from __future__ import annotations

import anyio
import anyio.lowlevel
import pytest

from asyncinfer.engine.ports import BURST, Cell, current_port

pytestmark = pytest.mark.anyio

MANY = 8 * BURST


async def test_thousands_of_wake_ups_are_not_one_turn() -> None:
    port = current_port({})
    cells = [Cell(port) for _ in range(MANY)]
    news: list[None] = []
    woken = 0
    turns: list[int] = []

    async def consume(cell: Cell) -> None:
        nonlocal woken
        await cell.wait_for(lambda: news)
        woken += 1

    async with anyio.create_task_group() as tasks:
        for cell in cells:
            tasks.start_soon(consume, cell)
        with anyio.fail_after(30):
            while any(cell.waiter is None for cell in cells):
                await anyio.lowlevel.checkpoint()
            news.append(None)
            for cell in cells:
                port.notify(cell)
            port.flush()
            while woken < MANY:
                before = woken
                await anyio.lowlevel.checkpoint()
                turns.append(woken - before)
    # trio runs what is due in any order, so that two bursts may lie between two of our turns.
    assert max(turns) <= 2 * BURST
    assert sum(turns) == MANY
