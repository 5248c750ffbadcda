"""The applications of docs/web.md behind a socket: what a client that leaves ends."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import anyio
import pytest
from docs.test_docs import blocks
from server.chat_model import listening
from support import Until

import asyncinfer
from asyncinfer.testing import FakeModel, StepGate

pytestmark = pytest.mark.anyio

PAGE = Path(__file__).resolve().parents[2] / "docs" / "web.md"
#: Tokens of a prompt, those of one step, and the steps that the prompt takes.
PROMPT, STEP = 1024, 64
STEPS = PROMPT // STEP


def application(framework: str, engine: asyncinfer.Engine) -> Any:
    """The page's application on an engine that is open."""
    module: dict[str, Any] = {"__name__": "page"}
    marks = ["app = Starlette("] + ["app = FastAPI("] * (framework == "fastapi")
    for mark in marks:
        (block,) = (each for each in blocks(PAGE.read_text("utf-8"), "web") if mark in each.code)
        # The second one's annotations are read by FastAPI, so that they cannot be strings.
        exec(compile(block.code, "page", "exec", dont_inherit=True), module)

    async def with_engine(scope: Any, receive: Any, send: Any) -> None:
        await module["app"]({**scope, "state": {"engine": engine}}, receive, send)

    return with_engine


class Client:
    """One request over a connection of its own."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.reader = reader
        self._writer = writer

    @classmethod
    async def ask(cls, port: int, prompt: str, stream: bool) -> Client:
        client = cls(*await asyncio.open_connection("127.0.0.1", port))
        body = json.dumps({"prompt": prompt, "stream": stream}).encode()
        head = "POST /complete HTTP/1.1\r\nhost: a\r\nconnection: close\r\n"
        head += f"content-type: application/json\r\ncontent-length: {len(body)}\r\n\r\n"
        client._writer.write(head.encode() + body)
        return client

    def leave(self) -> None:
        self._writer.transport.abort()


@pytest.mark.parametrize("anyio_backend", ["asyncio"])
@pytest.mark.parametrize("framework", ["starlette", "fastapi"])
@pytest.mark.parametrize("stream", [False, True], ids=["whole", "streamed"])
@pytest.mark.parametrize("steps", [2, STEPS + 20], ids=["prefill", "decode"])
async def test_a_client_that_leaves_ends_its_request(
    framework: str, stream: bool, steps: int, until: Until
) -> None:
    pytest.importorskip(framework)
    gate = StepGate()
    config = asyncinfer.EngineConfig(max_step_tokens=STEP)
    async with asyncinfer.Engine(FakeModel(gate=gate, strict=False), config=config) as engine:
        async with listening(application(framework, engine)) as url:
            port = int(url.rpartition(":")[2])
            # So that everything that is made once is there.
            client = await Client.ask(port, "a", stream)
            assert (await client.reader.read()).startswith(b"HTTP/1.1 200")
            client.leave()
            await anyio.wait_all_tasks_blocked()
            idle = asyncio.all_tasks()
            before = gate.arrived
            generated = engine.stats().generated_tokens
            gate.close()
            gate.let(steps)
            client = await Client.ask(port, "a" * PROMPT, stream)
            await until(lambda: gate.arrived > before + steps)
            if stream and steps > STEPS:
                assert (await client.reader.readline()).startswith(b"HTTP/1.1 200")
            client.leave()
            # The step is still held: the handler ends by the client alone.
            await until(lambda: asyncio.all_tasks() <= idle)
            gate.open()
            await until(lambda: engine.stats().running == 0)
            await until(lambda: engine.stats().aborted == 1)
            assert gate.arrived <= before + steps + 3
            if steps < STEPS:
                assert engine.stats().generated_tokens == generated
