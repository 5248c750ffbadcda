"""Engines opened and closed many times, and one that is closed with a thousand streams."""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import anyio

from asyncinfer import AsyncInferError, Engine, EngineClosed, EngineConfig
from asyncinfer.bench.gates import Phase
from asyncinfer.bench.soak.lateness import Lateness, watch_lateness
from asyncinfer.bench.soak.process import Holdings, in_use_mib, rss_mib, settled
from asyncinfer.testing import FakeModel, Step

__all__ = ["CloseRun", "CycleRun", "measure_close", "measure_cycles"]

#: Every so many-th engine is closed while it opens.
WHILE_OPENING = 10
#: Seconds that its model takes to load, and after which it is closed.
LOADING, PATIENCE = 0.02, 0.005
#: Seconds of a step.
STEP = 0.005


@dataclass(frozen=True, slots=True)
class CycleRun:
    """`cycles` engines."""

    cycles: int
    while_opening: int
    #: Threads, tasks and file descriptors beyond those before the first.
    beyond: dict[str, int]
    #: Closes that raised, by type.
    errors: dict[str, int]
    #: MiB resident after each tenth of the cycles, and taken from malloc; None where the system
    #: does not say.
    rss: tuple[float, ...]
    in_use: tuple[float | None, ...]

    def growth(self) -> float:
        """MiB resident, over the second half."""
        return self.rss[-1] - self.rss[len(self.rss) // 2 - 1]


@dataclass(frozen=True, slots=True)
class CloseRun:
    """An engine closed with `streams` live streams."""

    streams: int
    seconds: float
    #: Streams that were told by `EngineClosed`.
    told: int
    #: Milliseconds that the event loop ran late meanwhile, at most.
    blocked: float
    #: Milliseconds that its thread computed between two looks a millisecond apart, at most: no turn
    #: of the loop took longer.
    busy: float
    beyond: dict[str, int]


class _SlowToLoad(FakeModel):
    """Takes a while to load."""

    def load(self, config: EngineConfig, progress: Any = None) -> Any:
        time.sleep(LOADING)
        return super().load(config, progress)


async def measure_cycles(cycles: int, report: Callable[[str], None]) -> CycleRun:
    """Open an engine, ask it something and close it, `cycles` times."""
    # What the first engine of a process imports and starts stays.
    await _whole()
    before = Holdings.now()
    errors: dict[str, int] = {}
    rss: list[float] = []
    in_use: list[float | None] = []
    opening = 0
    for cycle in range(1, cycles + 1):
        report(f"opening and closing: {cycle} of {cycles}")
        try:
            if cycle % WHILE_OPENING:
                await _whole()
            else:
                opening += 1
                await (_cancelled() if opening % 2 else _closed())
        except AsyncInferError as error:
            errors[type(error).__name__] = errors.get(type(error).__name__, 0) + 1
        if cycle * 10 // cycles != (cycle - 1) * 10 // cycles:
            rss.append(round(rss_mib(), 2))
            taken = in_use_mib()
            in_use.append(None if taken is None else round(taken, 2))
    beyond = await settled(before)
    return CycleRun(cycles, opening, beyond, errors, tuple(rss), tuple(in_use))


async def _whole() -> None:
    async with Engine(FakeModel(strict=False), drain_timeout=0.0) as engine:
        await engine.generate("hello", max_tokens=4, temperature=0.0)


async def _cancelled() -> None:
    """By the cancellation of the task that opens it."""
    with anyio.move_on_after(PATIENCE):
        async with Engine(_SlowToLoad(strict=False), drain_timeout=0.0):
            pass


async def _closed() -> None:
    """By another task."""
    engine = Engine(_SlowToLoad(strict=False), drain_timeout=0.0)

    async def opener() -> None:
        with suppress(EngineClosed):
            async with engine:
                pass

    async with anyio.create_task_group() as tasks:
        tasks.start_soon(opener)
        await anyio.sleep(PATIENCE)
        await engine.aclose()


async def measure_close(streams: int) -> CloseRun:
    """Close an engine without a drain while `streams` streams decode."""
    before = Holdings.now()

    def gate(phase: Phase, plan: Step) -> None:
        if phase == "collect":
            time.sleep(STEP)

    model = FakeModel(blocks=streams * 64, max_context=1024, strict=False, gate=gate)
    config = EngineConfig(max_running=streams, max_requests=streams, max_step_tokens=8192)
    engine = await Engine.open(model, config=config)
    began, told = 0, 0
    all_began = anyio.Event()

    async def consume() -> None:
        nonlocal began, told
        stream = engine.stream("hello", max_tokens=1000, temperature=0.0, ignore_eos=True)
        try:
            async with stream:
                await anext(stream)
                began += 1
                if began == streams:
                    all_began.set()
                async for _ in stream:
                    pass
        except EngineClosed:
            told += 1

    late, busy = Lateness(), Lateness()
    async with anyio.create_task_group() as tasks:
        for _ in range(streams):
            tasks.start_soon(consume)
        with anyio.fail_after(120):
            await all_began.wait()
        async with anyio.create_task_group() as watch:
            watch.start_soon(watch_lateness, lambda: late, lambda: busy)
            await anyio.sleep(0.1)
            late, busy = Lateness(), Lateness()
            start = time.perf_counter()
            await engine.aclose(drain_timeout=0.0)
            seconds = time.perf_counter() - start
            watch.cancel_scope.cancel()
    return CloseRun(streams, seconds, told, late.max, busy.max, await settled(before))
