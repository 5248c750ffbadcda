"""Many clients at once, half of which leave: everything comes back."""

from __future__ import annotations

import asyncio
import gc
import json
import os
import random
from collections.abc import Callable
from typing import Any

import anyio
import pytest
from server.chat_model import CHAT, Answer, ChatModel, ask, listening
from support import Until, places

from asyncinfer import Engine, openai_client
from asyncinfer.server import call as call_module
from asyncinfer.server import create_app

pytestmark = pytest.mark.anyio

CLIENTS = 200
TOKENS = 24


def descriptors() -> int:
    return len(os.listdir("/proc/self/fd"))


async def client(port: int, leave_after: int | None) -> int:
    """One stream over a socket of its own; gives the events that it read."""
    # One that leaves has an answer that is not over by then.
    most = TOKENS if leave_after is None else 3000
    body = {"messages": CHAT, "stream": True, "max_tokens": most}
    data = json.dumps(body).encode()
    head = "POST /v1/chat/completions HTTP/1.1\r\nhost: a\r\ncontent-type: application/json\r\n"
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    seen = 0
    try:
        writer.write(f"{head}content-length: {len(data)}\r\n\r\n".encode() + data)
        await writer.drain()
        while leave_after is None or seen < leave_after:
            line = await reader.readline()
            seen += line.startswith(b"data: ")
            if line.startswith(b"data: [DONE]"):
                return seen
            assert line, "the answer ended before its end"
    finally:
        writer.close()
        await writer.wait_closed()
    return seen


@pytest.mark.skipif(not os.path.exists("/proc/self/fd"), reason="counts descriptors by /proc")
async def test_half_of_the_clients_leave(until: Until, report: Callable[[str], None]) -> None:
    chance = random.Random(7)
    async with Engine(ChatModel(strict=False, blocks=4096)) as engine:
        async with listening(create_app(engine)) as url:
            port = int(url.rpartition(":")[2])
            await client(port, None)
            gc.collect()
            before = descriptors(), len(asyncio.all_tasks())
            leaving = [chance.randrange(TOKENS) if each % 2 else None for each in range(CLIENTS)]
            late: list[float] = []
            async with anyio.create_task_group() as tasks:

                async def lag() -> None:
                    while True:
                        began = anyio.current_time()
                        await anyio.sleep(0.001)
                        late.append(anyio.current_time() - began - 0.001)

                tasks.start_soon(lag)
                seen = await asyncio.gather(*(client(port, each) for each in leaving))
                tasks.cancel_scope.cancel()
            stayed = [each for each, left in zip(seen, leaving, strict=True) if left is None]
            # A role, the tokens (some of which are no whole character yet), an end and the mark.
            assert len(stayed) == CLIENTS // 2
            assert min(stayed) > TOKENS // 2
            await until(lambda: places(engine) == 0)
            stats = engine.stats()
            assert stats.finished + stats.aborted == CLIENTS + 1
            assert stats.aborted == CLIENTS // 2
            assert stats.blocks_free + stats.blocks_cached == stats.blocks_total
            await until(lambda: (descriptors(), len(asyncio.all_tasks())) <= before)
            late.sort()
            p99 = late[int(len(late) * 0.99)] * 1e3
            report(f"{CLIENTS} HTTP streams, clients on the same loop: lag p99 {p99:.1f} ms")


async def test_an_in_process_stream_that_is_left_leaves_nothing(until: Until) -> None:
    async with Engine(ChatModel()) as engine, openai_client(engine) as inside:
        before = len(asyncio.all_tasks())
        for _ in range(5):
            stream = await inside.chat.completions.create(
                model="ChatModel",
                messages=CHAT,  # type: ignore[arg-type]
                max_tokens=3000,
                stream=True,
            )
            async with stream:
                await anext(aiter(stream))
        # Whole answers are left while they are waited for.
        for _ in range(5):
            with anyio.move_on_after(0.01):
                await inside.chat.completions.create(
                    model="ChatModel",
                    messages=CHAT,  # type: ignore[arg-type]
                    max_tokens=3000,
                    extra_body={"ignore_eos": True},
                )
                pytest.fail("3000 tokens within 10 ms")
        await until(lambda: places(engine) == 0)
        await until(lambda: len(asyncio.all_tasks()) <= before)
        assert engine.stats().running == 0
        assert engine.stats().aborted >= 5


@pytest.mark.parametrize("stream", [False, True])
async def test_a_client_that_never_reads_is_gone(
    stream: bool, monkeypatch: pytest.MonkeyPatch, until: Until
) -> None:
    monkeypatch.setattr(call_module, "UNREAD_SECONDS", 0.02)
    sent: list[str] = []

    class Unread(Answer):
        """Whose server waits once it has sent the head."""

        async def take(self, message: dict[str, Any]) -> None:
            await super().take(message)
            sent.append(message["type"])
            if message["type"] == "http.response.body":
                await anyio.sleep_forever()

    async with Engine(ChatModel()) as engine:
        app = create_app(engine)
        body = {"messages": CHAT, "stream": stream, "max_tokens": 3000, "ignore_eos": True}
        with anyio.fail_after(60):
            await ask(app, "/v1/chat/completions", body, answer=Unread())
        assert sent == ["http.response.start", "http.response.body"]
        await until(lambda: places(engine) == 0)
        assert b'chat/completions",status="499"} 1' in (await ask(app, "/metrics")).body
