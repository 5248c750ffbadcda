"""The cost of a call by an in-process client, beyond the engine's own and beyond the client's."""

from __future__ import annotations

import gc
import importlib
import os
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import AsyncExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from statistics import median
from types import ModuleType
from typing import Any, Final

from asyncinfer import Engine, in_process_transport, openai_client
from asyncinfer.bench.http.options import CHAT, TEMPLATE
from asyncinfer.testing import ChatTemplate, FakeModel

__all__ = ["CallCost", "measure_calls", "one_core"]

#: Tokens of an answer, calls in one turn, and calls of each kind before the first turn.
TOKENS: Final = 8
TURN: Final = 10
WARM_UP: Final = 50
_ENGINE: Final[dict[str, Any]] = {"max_tokens": TOKENS, "seed": 7, "ignore_eos": True}
_CLIENT: Final[dict[str, Any]] = {
    "model": "fake",
    "messages": CHAT,
    "max_completion_tokens": TOKENS,
    "seed": 7,
    "extra_body": {"ignore_eos": True},
}


@dataclass(frozen=True, slots=True)
class CallCost:
    """CPU microseconds of the event loop's thread for one call: medians over turns."""

    streamed: bool
    calls: int
    #: Calls of the engine's own method.
    engine: float
    #: Calls by OpenAI's client in process.
    client: float
    #: Calls by OpenAI's client on a transport with a canned answer, in the same parts: the time of
    #: the client itself to write requests and read answers.
    alone: float
    #: How much more a call takes than the engine's in the same turn, since a machine's speed
    #: changes between turns.
    added: float
    #: How much more our transport and application take than the engine's call in the same turn, for
    #: the request that the client makes, read to its end without the client.
    ours: float


async def measure_calls(calls: int) -> tuple[CallCost, CallCost]:
    """Measure whole and streamed answers. `ModuleNotFoundError` without the extra `openai`."""
    model = FakeModel(strict=False, template=ChatTemplate(TEMPLATE))
    async with Engine(model) as engine, AsyncExitStack() as stack:
        client = await stack.enter_async_context(openai_client({"fake": engine}))
        httpx = _http_library()
        transport = in_process_transport(httpx, {"fake": engine})

        async def generate() -> None:
            await engine.generate(CHAT, **_ENGINE)

        async def stream() -> None:
            async with engine.stream(CHAT, **_ENGINE) as answer:
                async for _ in answer:
                    pass

        costs = []
        for streamed, direct, ask in ((False, generate, _ask), (True, stream, _read)):
            heard = _Heard(transport)
            canned = await stack.enter_async_context(_canned(httpx, heard))
            ways = (direct, partial(ask, client), partial(ask, canned), heard.again)
            costs.append(await _in_turns(streamed, calls, *ways))
    return costs[0], costs[1]


@contextmanager
def one_core() -> Iterator[None]:
    """Have this thread, and the threads that it starts, run on one core where the system lets them.

    Moving the GIL from one core to another costs more than the work between two moves, and how
    often it moves depends on other programs."""
    if not hasattr(os, "sched_setaffinity"):
        yield
        return
    before = os.sched_getaffinity(0)
    os.sched_setaffinity(0, {min(before)})
    try:
        yield
    finally:
        os.sched_setaffinity(0, before)


async def _ask(client: Any) -> None:
    await client.chat.completions.create(**_CLIENT)


async def _read(client: Any) -> None:
    async for _ in await client.chat.completions.create(stream=True, **_CLIENT):
        pass


async def _in_turns(streamed: bool, calls: int, *ways: Callable[[], Awaitable[None]]) -> CallCost:
    """The cost of the engine, the client, the client alone, and the transport without a client."""
    for way in ways:
        for _ in range(WARM_UP):
            await way()
    gc.collect()
    took: list[list[float]] = [[] for _ in ways]
    for _ in range(max(1, calls // TURN)):
        for times, way in zip(took, ways, strict=True):
            began = time.thread_time()
            for _ in range(TURN):
                await way()
            times.append((time.thread_time() - began) / TURN * 1e6)
    engine, client, alone, _ = map(median, took)
    added = median(clients - engines for engines, clients, _, _ in zip(*took, strict=True))
    ours = median(bare - engines for engines, _, _, bare in zip(*took, strict=True))
    return CallCost(streamed, len(took[0]) * TURN, engine, client, alone, added, ours)


def _http_library() -> ModuleType:
    """The HTTP library of OpenAI's client."""
    import openai

    bases = openai.DefaultAsyncHttpxClient.__mro__
    name = next(each.__module__.partition(".")[0] for each in bases if "httpx" in each.__module__)
    return importlib.import_module(name)


class _Heard:
    """A client's first request, and our application's answer to it."""

    def __init__(self, transport: Any) -> None:
        self._transport = transport
        self._request: Any = None
        self.head: dict[str, Any] = {}
        self.parts: list[bytes] = []

    async def ask(self, request: Any) -> None:
        """Record the first request, and get its answer."""
        if self._request is None:
            self._request = request
            await self.again()

    async def again(self) -> None:
        """Send the request again, by our transport."""
        answer = await self._transport.handle_async_request(self._request)
        try:
            parts = [part async for part in answer.stream]
        finally:
            await answer.aclose()
        if not self.parts:
            self.head = {"status_code": answer.status_code, "headers": answer.headers.raw}
            self.parts = parts


def _canned(httpx: ModuleType, heard: _Heard) -> Any:
    """A client whose transport has a canned answer."""
    import openai

    class HeardBody(httpx.AsyncByteStream):  # type: ignore[name-defined,misc]
        async def __aiter__(self) -> AsyncIterator[bytes]:
            for part in heard.parts:
                yield part

    class HeardTransport(httpx.AsyncBaseTransport):  # type: ignore[name-defined,misc]
        async def handle_async_request(self, request: Any) -> Any:
            await request.aread()
            await heard.ask(request)
            return httpx.Response(**heard.head, stream=HeardBody())

    http = httpx.AsyncClient(transport=HeardTransport())
    return openai.AsyncOpenAI(base_url="http://a/v1", api_key="none", http_client=http)
