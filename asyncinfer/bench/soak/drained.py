"""What an engine still holds after its last request."""

from __future__ import annotations

import time

import anyio

from asyncinfer import AsyncInferError, Engine

__all__ = ["pages_lost", "places_lost"]


async def pages_lost(engine: Engine) -> int:
    """Pages that are neither free nor cached once nothing runs, waited for ten seconds at most."""
    until = time.monotonic() + 10.0
    while True:
        stats = engine.stats()
        lost = stats.blocks_total - stats.blocks_free - stats.blocks_cached
        idle = not (stats.running or stats.waiting or stats.paused)
        if (idle and not lost) or time.monotonic() > until:
            return lost
        await anyio.sleep(0.01)


async def places_lost(engine: Engine, places: int) -> int:
    """How many of as many requests as the engine holds are refused, though nobody asks for others.
    Waited for: a prompt that was left counts until the thread that tokenises it looks."""
    until = time.monotonic() + 10.0
    while True:
        refused = await _refused(engine, places)
        if not refused or time.monotonic() > until:
            return refused
        await anyio.sleep(0.05)


async def _refused(engine: Engine, requests: int) -> int:
    refused = 0

    async def ask() -> None:
        nonlocal refused
        try:
            await engine.generate("once more", max_tokens=2, temperature=0.0)
        except AsyncInferError:
            refused += 1

    async with anyio.create_task_group() as tasks:
        for _ in range(requests):
            tasks.start_soon(ask)
    return refused
