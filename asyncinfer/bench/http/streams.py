"""Many HTTP streams, half of whose clients leave: the lag of the server's event loop, and leaks."""

from __future__ import annotations

import asyncio
import gc
import multiprocessing
import socket
import time
from collections.abc import AsyncIterator
from concurrent.futures import ProcessPoolExecutor
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from typing import Any

import anyio

from asyncinfer import Engine, EngineConfig
from asyncinfer.bench.gates import Phase
from asyncinfer.bench.http.clients import Clients, Seen, run_clients
from asyncinfer.bench.http.options import CHAT, TEMPLATE, HttpOptions
from asyncinfer.bench.quantiles import Quantiles
from asyncinfer.bench.record import BenchError
from asyncinfer.bench.soak.process import Holdings, settled
from asyncinfer.bench.ticker import ticking
from asyncinfer.testing import ChatTemplate, FakeModel, Step

__all__ = ["StreamsRun", "measure_http_streams"]


@dataclass(frozen=True, slots=True)
class StreamsRun:
    """Clients in another process; times of the server's event loop in milliseconds."""

    seen: Seen
    #: Lateness of a task that sleeps for a millisecond, without clients and with all of them.
    idle: Quantiles
    busy: Quantiles
    #: CPU microseconds of the loop's thread for each event.
    event_cpu: float
    #: Seconds from the last client's end until no page and request was held.
    back: float
    #: What was held beyond what was held before the clients came.
    pages: int
    requests: int
    tasks: int
    descriptors: int

    @property
    def added_p99(self) -> float:
        return self.busy.p99 - self.idle.p99

    @property
    def kept(self) -> int:
        return self.pages + self.requests + self.tasks + self.descriptors


async def measure_http_streams(options: HttpOptions) -> StreamsRun:
    """Raises `BenchError` for an answer that was neither whole nor left."""
    model = FakeModel(
        blocks=8 * options.streams * (options.tokens // 16 + 8),
        strict=False,
        gate=_Paced(options.streams / options.rate),
        template=ChatTemplate(TEMPLATE),
    )
    config = EngineConfig(
        max_running=options.streams, max_requests=4 * options.streams, drain_timeout=0.0
    )
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(1, mp_context=context) as pool:
        async with Engine(model, config=config) as engine, _listening(engine) as port:

            async def visited(clients: Clients) -> Seen:
                return await asyncio.wrap_future(pool.submit(run_clients, clients))

            body = {"messages": CHAT, "stream": True, "ignore_eos": True}
            clients = Clients(port, body, options.streams, options.seconds, options.tokens, 1)
            # Starts the process and makes all imports.
            await visited(replace(clients, streams=2, seconds=0.1, tokens=8))
            async with ticking() as ticker:
                await anyio.sleep(options.seconds)
            idle = Quantiles.of(ticker.late)
            gc.collect()
            before = Holdings.now()
            cpu = time.thread_time()
            async with ticking() as ticker:
                seen = await visited(clients)
            cpu = time.thread_time() - cpu
            pages, requests, back = await _given_back(engine)
            left = await settled(before)
    if seen.broken:
        raise BenchError(f"{len(seen.broken)} answers broke off, the first with {seen.broken[0]!r}")
    return StreamsRun(
        seen=seen,
        idle=idle,
        busy=Quantiles.of(ticker.late),
        event_cpu=cpu / max(1, seen.events) * 1e6,
        back=back,
        pages=pages,
        requests=requests,
        tasks=left["tasks"],
        descriptors=left["descriptors"],
    )


async def _given_back(engine: Engine) -> tuple[int, int, float]:
    """Pages and requests that are still held after at most ten seconds, and the seconds until
    none was."""
    began = time.monotonic()
    while True:
        stats = engine.stats()
        pages = stats.blocks_total - stats.blocks_free - stats.blocks_cached
        requests = stats.running + stats.waiting + stats.paused
        took = time.monotonic() - began
        if not (pages or requests) or took > 10.0:
            return pages, requests, took
        await anyio.sleep(0.001)


class _Paced:
    """A gate that lets no step take less than `seconds`. The decode thread waits for it without the
    GIL, as for a device."""

    def __init__(self, seconds: float) -> None:
        self._seconds = seconds
        self._due = 0.0

    def __call__(self, phase: Phase, plan: Step) -> None:
        if phase == "collect":
            now = time.monotonic()
            self._due = max(self._due + self._seconds, now)
            time.sleep(self._due - now)


@asynccontextmanager
async def _listening(engine: Engine) -> AsyncIterator[int]:
    """Serve the application on a local socket, and yield its port."""
    try:
        import uvicorn

        from asyncinfer.server import create_app

        app: Any = create_app(engine)
    except ModuleNotFoundError as error:
        raise BenchError(f'{error}: pip install "asyncinfer[server]"') from error
    with socket.create_server(("127.0.0.1", 0)) as listener:
        server = uvicorn.Server(uvicorn.Config(app, log_level="warning", lifespan="off"))
        task = asyncio.create_task(server.serve([listener]))
        try:
            yield listener.getsockname()[1]
        finally:
            server.should_exit = True
            await task
