"""The transport by which a client talks to an application in its own process."""

from __future__ import annotations

import asyncio
import gc
import weakref
from collections.abc import Callable
from contextlib import suppress
from types import ModuleType
from typing import Any

import anyio
import anyio.lowlevel
import httpx
import httpx2
import pytest
from support import Until

from asyncinfer.clients.exchange import MOST_UNREAD, Exchange
from asyncinfer.clients.transport import async_transport, sync_transport

pytestmark = pytest.mark.anyio

BOTH = pytest.mark.parametrize("library", [httpx, httpx2], ids=["httpx", "httpx2"])


class Slow:
    """Sends a part of a body for each permit, and notes how it ended."""

    def __init__(self) -> None:
        self.permits, self.take = anyio.create_memory_object_stream[bytes](100)
        self.disconnected = False
        self.cancelled = False
        self.done = False
        self.scope: Any = None
        self.body: Any = None

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        self.scope = scope
        self.body = (await receive())["body"]
        try:
            async with anyio.create_task_group() as tasks:

                async def watch() -> None:
                    self.disconnected = (await receive())["type"] == "http.disconnect"

                tasks.start_soon(watch)
                start = {"type": "http.response.start", "status": 201}
                if await self.take.receive() == b"raise":
                    raise LookupError("broken")
                await send({**start, "headers": [(b"x-kind", b"slow")]})
                while (part := await self.take.receive()) != b"end":
                    if part == b"raise":
                        raise LookupError("broken")
                    body = {"type": "http.response.body", "body": part, "more_body": True}
                    await send(body)
                await send({"type": "http.response.body", "body": b""})
                self.done = True
                tasks.cancel_scope.cancel()
        except anyio.get_cancelled_exc_class():
            self.cancelled = True
            raise

    def close(self) -> None:
        self.permits.close()
        self.take.close()


@pytest.fixture
async def app() -> Any:
    app = Slow()
    yield app
    app.close()


@BOTH
async def test_an_answer_is_read_while_it_is_made(app: Slow, library: ModuleType) -> None:
    async with library.AsyncClient(transport=async_transport(library, app)) as client:
        app.permits.send_nowait(b"go")
        async with client.stream("POST", "http://a/b%20c?d=e", content=b"question") as answer:
            assert (answer.status_code, answer.headers["x-kind"]) == (201, "slow")
            assert app.body == b"question"
            assert (app.scope["path"], app.scope["query_string"]) == ("/b c", b"d=e")
            parts = answer.aiter_bytes()
            for part in (b"one", b"two"):
                app.permits.send_nowait(part)
                assert await anext(parts) == part
            assert not app.done
            app.permits.send_nowait(b"end")
            assert [part async for part in parts] == []
    assert app.done
    assert not app.cancelled


@BOTH
@pytest.mark.parametrize("begun", [False, True])
async def test_leaving_cancels(app: Slow, library: ModuleType, begun: bool, until: Until) -> None:
    async with library.AsyncClient(transport=async_transport(library, app)) as client:
        if begun:
            app.permits.send_nowait(b"go")
            async with client.stream("GET", "http://a/"):
                pass
        else:
            with anyio.move_on_after(0.01):
                await client.get("http://a/")
        # Closing waits for it.
        assert app.cancelled


async def test_an_answer_that_nobody_closes_is_cancelled(app: Slow, until: Until) -> None:
    transport = async_transport(httpx2, app)
    app.permits.send_nowait(b"go")
    answer = await transport.handle_async_request(httpx2.Request("GET", "http://a/"))
    assert answer.status_code == 201
    del answer
    gc.collect()
    await until(lambda: app.cancelled)


@BOTH
async def test_a_timeout_ends_the_application(app: Slow, library: ModuleType) -> None:
    transport = async_transport(library, app)
    async with library.AsyncClient(transport=transport, timeout=0.01) as client:
        with pytest.raises(library.ReadTimeout):
            await client.get("http://a/")
        assert app.cancelled

        async def begin_only(seconds: float) -> None:
            app.cancelled = False
            app.permits.send_nowait(b"go")
            async with client.stream("GET", "http://a/", timeout=seconds) as answer:
                with pytest.raises(library.ReadTimeout):
                    await answer.aread()

        # The shortest time in which an answer begins here.
        for seconds in (0.01, 0.1, 1.0, 10.0):
            with suppress(library.ReadTimeout):
                await begin_only(seconds)
                break
        else:
            pytest.fail("no answer began")
        assert app.cancelled


@BOTH
@pytest.mark.parametrize("before", [[], [b"go", b"one"]])
async def test_a_broken_application_is_a_broken_answer(
    app: Slow, library: ModuleType, before: list[bytes]
) -> None:
    for part in (*before, b"raise"):
        app.permits.send_nowait(part)
    async with library.AsyncClient(transport=async_transport(library, app)) as client:
        with pytest.raises(library.RemoteProtocolError):
            await client.get("http://a/")


async def test_an_application_waits_for_a_slow_reader(app: Slow, until: Until) -> None:
    made = 0

    async def many(scope: Any, receive: Any, send: Any) -> None:
        nonlocal made
        await send({"type": "http.response.start", "status": 200, "headers": []})
        for _ in range(1000):
            made += 1
            await send({"type": "http.response.body", "body": b"x" * 10, "more_body": True})
        await send({"type": "http.response.body", "body": b""})

    async with httpx2.AsyncClient(transport=async_transport(httpx2, many)) as client:
        async with client.stream("GET", "http://a/") as answer:
            await anyio.wait_all_tasks_blocked()
            assert made < 100
            assert len(await answer.aread()) == 10_000


async def test_an_application_ends_though_nobody_reads_its_last_part(until: Until) -> None:
    ended = False

    async def many(scope: Any, receive: Any, send: Any) -> None:
        nonlocal ended
        await send({"type": "http.response.start", "status": 200, "headers": []})
        for unread in range(MOST_UNREAD):
            more = unread < MOST_UNREAD - 1
            await send({"type": "http.response.body", "body": b"x", "more_body": more})
        ended = True

    async with httpx2.AsyncClient(transport=async_transport(httpx2, many)) as client:
        async with client.stream("GET", "http://a/"):
            await anyio.wait_all_tasks_blocked()
        await until(lambda: ended)


@BOTH
@pytest.mark.parametrize("anyio_backend", ["asyncio"])
async def test_without_an_event_loop(library: ModuleType) -> None:
    ended: list[str] = []

    async def app(scope: Any, receive: Any, send: Any) -> None:
        try:
            await send({"type": "http.response.start", "status": 200, "headers": []})
            await send({"type": "http.response.body", "body": b"one", "more_body": True})
            if scope["path"] == "/wait":
                await anyio.sleep_forever()
            await send({"type": "http.response.body", "body": b"two"})
            ended.append("done")
        except anyio.get_cancelled_exc_class():
            ended.append("cancelled")
            raise

    def work(use: Callable[[Any], object]) -> None:
        with library.Client(transport=sync_transport(library, app), timeout=120) as client:
            use(client)

    def whole(client: Any) -> None:
        assert client.get("http://a/").content == b"onetwo"

    def left(client: Any) -> None:
        with client.stream("GET", "http://a/wait") as answer:
            assert next(answer.iter_bytes()) == b"one"

    def late(client: Any) -> None:
        with pytest.raises(library.ReadTimeout):
            client.get("http://a/wait", timeout=0.1)

    for use in (whole, left, late):
        await anyio.to_thread.run_sync(work, use)
    assert ended == ["done", "cancelled", "cancelled"]


@pytest.mark.parametrize("closed", [True, False], ids=["closed", "forgotten"])
async def test_an_application_that_loses_a_cancellation_is_cancelled_again(
    until: Until, closed: bool
) -> None:
    cancelled = 0

    async def app(scope: Any, receive: Any, send: Any) -> None:
        nonlocal cancelled
        await send({"type": "http.response.start", "status": 200, "headers": []})
        with suppress(anyio.get_cancelled_exc_class()):
            await anyio.sleep_forever()
        try:
            await anyio.sleep_forever()
        finally:
            cancelled += 1

    exchange = Exchange(app, {}, b"")
    await exchange.begin(60)
    if closed:
        await exchange.close()
        assert cancelled == 1
    else:
        del exchange
        gc.collect()
        await until(lambda: cancelled)


async def test_an_application_that_is_left_before_it_begins_does_nothing() -> None:
    begun = []

    async def app(scope: Any, receive: Any, send: Any) -> None:
        begun.append(scope)

    await Exchange(app, {}, b"").close()
    assert not begun


@pytest.mark.parametrize("anyio_backend", ["asyncio"])
async def test_each_wait_has_its_own_time() -> None:
    """One timer serves the waits of an answer, whichever of them is the shortest."""
    release = anyio.Event()

    async def app(scope: Any, receive: Any, send: Any) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": []})
        await send({"type": "http.response.body", "body": b"one", "more_body": True})
        await anyio.sleep(0.1)
        await send({"type": "http.response.body", "body": b"two", "more_body": True})
        await release.wait()

    exchange = Exchange(app, {}, b"")
    with anyio.fail_after(60):
        # Met in one turn of the loop, and its time is up while a longer wait goes on.
        await exchange.begin(0.05)
        assert await exchange.read(60) == b"one"
        assert await exchange.read(60) == b"two"
        with pytest.raises(TimeoutError):
            await exchange.read(0.01)
        late: list[float] = []

        async def read(seconds: float) -> None:
            with pytest.raises(TimeoutError):
                await exchange.read(seconds)
            late.append(seconds)

        # Several at once, the shorter time first or last; one that nobody times goes on.
        async with anyio.create_task_group() as group:
            group.start_soon(exchange.read)
            for seconds in (0.02, 0.04, 0.01):
                group.start_soon(read, seconds)
            while len(late) < 3:
                await anyio.sleep(0.001)
            group.cancel_scope.cancel()
        assert late == [0.01, 0.02, 0.04]
        await exchange.close()


@pytest.mark.parametrize("anyio_backend", ["asyncio"])
async def test_nothing_is_kept_of_waits_that_end_without_news(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A reader that looks again and again, with little time each, while nothing comes."""

    async def app(scope: Any, receive: Any, send: Any) -> None:
        await anyio.sleep_forever()

    loop = asyncio.get_running_loop()
    made: list[weakref.ref[asyncio.Future[Any]]] = []
    make = loop.create_future

    def create_future() -> asyncio.Future[Any]:
        made.append(weakref.ref(future := make()))
        return future

    exchange = Exchange(app, {}, b"")
    with pytest.raises(TimeoutError):
        await exchange.begin(0.001)
    await anyio.wait_all_tasks_blocked()
    monkeypatch.setattr(loop, "create_future", create_future)
    for _ in range(3):
        with suppress(TimeoutError):
            await exchange.read(0.001)
        with anyio.move_on_after(0.001):
            await exchange.read(60)
    await anyio.lowlevel.checkpoint()
    gc.collect()
    assert len(made) >= 6
    assert not [future for future in made if future() is not None]
    await exchange.close()
