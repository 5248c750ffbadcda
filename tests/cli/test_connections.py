"""What `asyncinfer serve` sees to beside uvicorn."""

from __future__ import annotations

import asyncio
import resource
from typing import Any

import anyio
import pytest
import uvicorn

from asyncinfer.cli.connections import allow_connections, close_silent


@pytest.fixture
def anyio_backend() -> str:
    return "asyncio"


@pytest.mark.anyio
async def test_who_says_nothing_is_closed_and_who_waits_for_an_answer_is_not() -> None:
    asked, answering = anyio.Event(), anyio.Event()

    async def app(scope: Any, receive: Any, send: Any) -> None:
        asked.set()
        await answering.wait()
        await send({"type": "http.response.start", "status": 204, "headers": []})
        await send({"type": "http.response.body"})

    config = uvicorn.Config(app, port=0, lifespan="off", log_level="warning")
    server = uvicorn.Server(config)
    serving = asyncio.create_task(server.serve())
    with anyio.fail_after(120):
        while not server.started:
            await anyio.sleep(0.001)
        port = server.servers[0].sockets[0].getsockname()[1]
        head = b"GET / HTTP/1.1\r\nhost: localhost\r\n"
        streams = {}
        for sent in (b"", head, head + b"\r\n"):
            streams[sent] = await anyio.connect_tcp("127.0.0.1", port)
            if sent:
                await streams[sent].send(sent)
        await asked.wait()
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(close_silent, server, 0.05)
            for sent in (b"", head):
                with pytest.raises(anyio.EndOfStream):
                    await streams[sent].receive()
            answering.set()
            assert (await streams[head + b"\r\n"].receive()).startswith(b"HTTP/1.1 204")
            with pytest.raises(anyio.EndOfStream):
                await streams[head + b"\r\n"].receive()
            tasks.cancel_scope.cancel()
        for stream in streams.values():
            await stream.aclose()
        server.should_exit = True
        await serving


def test_there_may_be_as_many_connections_as_the_system_allows() -> None:
    now, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    try:
        resource.setrlimit(resource.RLIMIT_NOFILE, (min(now, 1024), most))
        allow_connections()
        least = 1 << 16 if most == resource.RLIM_INFINITY else min(1 << 16, most)
        assert resource.getrlimit(resource.RLIMIT_NOFILE) == (least, most)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (now, most))
