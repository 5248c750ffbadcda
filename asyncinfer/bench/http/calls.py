"""What a call by an in-process client costs beyond the engine's own, and beyond the client's."""

from __future__ import annotations

import gc
import importlib
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AsyncExitStack
from dataclasses import dataclass
from statistics import median
from types import ModuleType
from typing import Any, Final

import anyio

from asyncinfer import Engine, openai_client
from asyncinfer.bench.http.options import CHAT, TEMPLATE
from asyncinfer.server import create_app
from asyncinfer.testing import ChatTemplate, FakeModel

__all__ = ["CallCost", "measure_calls"]

#: Tokens of an answer, calls in one turn, and those of each kind before the first.
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
    #: By the engine's own method.
    engine: float
    #: By OpenAI's client, in process.
    client: float
    #: By OpenAI's client on a transport that has the same answer at hand, in the same parts: what
    #: the client itself takes to write requests and read answers.
    alone: float
    #: What a call takes more than the engine's in the same turn, and what of that is not the
    #: client's own: a machine's speed changes between turns.
    added: float
    ours: float


async def measure_calls(calls: int) -> tuple[CallCost, CallCost]:
    """Whole answers and streamed ones. Raises `ModuleNotFoundError` without the extra `openai`."""
    model = FakeModel(strict=False, template=ChatTemplate(TEMPLATE))
    async with AsyncExitStack() as stack:
        engine = await stack.enter_async_context(Engine(model))
        client = await stack.enter_async_context(openai_client({"fake": engine}))
        app = create_app({"fake": engine})
        whole = await stack.enter_async_context(await _canned(app, _ask))
        events = await stack.enter_async_context(await _canned(app, _read))

        async def generate() -> None:
            await engine.generate(CHAT, **_ENGINE)

        async def stream() -> None:
            async with engine.stream(CHAT, **_ENGINE) as answer:
                async for _ in answer:
                    pass

        return (
            await _in_turns(False, calls, generate, lambda: _ask(client), lambda: _ask(whole)),
            await _in_turns(True, calls, stream, lambda: _read(client), lambda: _read(events)),
        )


async def _ask(client: Any) -> None:
    await client.chat.completions.create(**_CLIENT)


async def _read(client: Any) -> None:
    async for _ in await client.chat.completions.create(stream=True, **_CLIENT):
        pass


async def _in_turns(streamed: bool, calls: int, *ways: Callable[[], Awaitable[None]]) -> CallCost:
    """The cost of the engine, the client, and the client alone."""
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
    engine, client, alone = map(median, took)
    added = median(clients - engines for engines, clients, _ in zip(*took, strict=True))
    ours = median(clients - engines - own for engines, clients, own in zip(*took, strict=True))
    return CallCost(streamed, len(took[0]) * TURN, engine, client, alone, added, ours)


async def _canned(app: Any, call: Callable[[Any], Awaitable[None]]) -> Any:
    """A client whose transport has the answer of `app` to this call at hand."""
    import openai

    own = openai.DefaultAsyncHttpxClient.__mro__
    library = next(each.__module__.partition(".")[0] for each in own if "httpx" in each.__module__)
    httpx: ModuleType = importlib.import_module(library)
    heard: list[dict[str, Any]] = []

    class Body(httpx.AsyncByteStream):  # type: ignore[name-defined,misc]
        async def __aiter__(self) -> AsyncIterator[bytes]:
            for message in heard[1:]:
                if part := message.get("body"):
                    yield part

    class Transport(httpx.AsyncBaseTransport):  # type: ignore[name-defined,misc]
        async def handle_async_request(self, request: Any) -> Any:
            body = await request.aread()
            if not heard:
                await _heard(app, request, body, heard)
            status, headers = heard[0]["status"], heard[0]["headers"]
            return httpx.Response(status, headers=headers, stream=Body())

    http = httpx.AsyncClient(transport=Transport())
    made = openai.AsyncOpenAI(base_url="http://a/v1", api_key="none", http_client=http)
    await call(made)
    return made


async def _heard(app: Any, request: Any, body: bytes, messages: list[dict[str, Any]]) -> None:
    """What an application sends in answer to a request."""
    scope = {
        "type": "http",
        "method": "POST",
        "path": request.url.path,
        "root_path": "",
        "headers": [(name.lower(), value) for name, value in request.headers.raw],
    }
    asked = [{"type": "http.request", "body": body}]

    async def receive() -> dict[str, Any]:
        if not asked:
            await anyio.sleep_forever()
        return asked.pop()

    async def send(message: dict[str, Any]) -> None:
        messages.append(message)

    await app(scope, receive, send)
