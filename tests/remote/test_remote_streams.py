"""Streams of replicas are cancelled, stopped and left as those of an engine are."""

from __future__ import annotations

import asyncio
import types
from collections.abc import Coroutine, Generator
from typing import Any

import pytest
from remote.wire import Wire, wires
from support import Until

from asyncinfer import Overloaded
from asyncinfer.remote import RemoteEngine, RemoteStream

pytestmark = pytest.mark.anyio


@pytest.fixture(params=["asyncio"])
def anyio_backend(request: pytest.FixtureRequest) -> Any:
    """Ray's loop: no other has replicas."""
    return request.param


class Slow:
    """A link whose answers arrive when a test says so."""

    def __init__(self, inner: Wire) -> None:
        self.inner = inner
        self.arrives = asyncio.Event()
        self.arrives.set()
        #: How many answers to calls of `take` have left the replica.
        self.taken = 0

    async def call(self, method: str, *args: Any) -> Any:
        result = await self.inner.call(method, *args)
        if method == "take":
            self.taken += 1
            await self.arrives.wait()
        return result


async def cancelled_take(stream: RemoteStream, link: Slow, until: Until) -> None:
    """Cancel a reader while what it is to read is on its way."""
    link.arrives.clear()
    before = link.taken
    reading = asyncio.ensure_future(anext(stream))
    await until(lambda: link.taken > before)
    reading.cancel()
    with pytest.raises(asyncio.CancelledError):
        await reading
    link.arrives.set()


async def test_the_whole_answer_after_a_cancelled_read_of_its_end(until: Until) -> None:
    link = Slow(wires(1)["replica-0"])
    async with RemoteEngine({"replica-0": link}) as remote:
        options: dict[str, Any] = {"max_tokens": 3, "temperature": 0.0, "ignore_eos": True}
        whole = await remote.generate("hello", **options)
        async with remote.stream("hello", **options) as stream:
            while (await anext(stream)).finish_reason is None:
                pass
            await cancelled_take(stream, link, until)
            assert (await stream).choices == whole.choices
        with pytest.raises(StopAsyncIteration):
            await anext(stream)


async def test_the_whole_answer_after_a_cancelled_read_of_its_middle(until: Until) -> None:
    link = Slow(wires(1)["replica-0"])
    async with RemoteEngine({"replica-0": link}) as remote:
        options: dict[str, Any] = {"max_tokens": 9, "temperature": 0.0, "ignore_eos": True}
        whole = await remote.generate("hello", **options)
        stream = remote.stream("hello", **options)
        await cancelled_take(stream, link, until)
        assert (await stream).choices == whole.choices
        # Nothing of it is left to be read.
        with pytest.raises(StopAsyncIteration):
            await anext(stream)


async def test_a_stream_is_stopped_from_another_thread() -> None:
    async with RemoteEngine(wires(1)) as remote:
        async with remote.stream("hello", max_tokens=3000, ignore_eos=True, buffer=8) as stream:
            await anext(stream)
            await asyncio.to_thread(stream.stop)
            assert [chunk async for chunk in stream][-1].finish_reason == "stopped"


async def enters(engine: RemoteEngine, _: asyncio.Event) -> None:
    async with engine.stream("hello", max_tokens=3000):
        raise AssertionError("it began")


async def reads(engine: RemoteEngine, _: asyncio.Event) -> None:
    async with engine.stream("hello", max_tokens=3000) as stream:
        await anext(stream)


async def waits(engine: RemoteEngine, _: asyncio.Event) -> None:
    await engine.stream("hello", max_tokens=3000)


async def rests(engine: RemoteEngine, there: asyncio.Event) -> None:
    async with engine.stream("hello", max_tokens=3000):
        there.set()
        await asyncio.Event().wait()


@types.coroutine
def turns(work: Coroutine[Any, Any, None]) -> Generator[Any, None, None]:
    """Take a coroutine's turns. It hears nothing of a cancellation."""
    while True:
        yield work.send(None)


@pytest.mark.parametrize(
    ("use", "at"), [(enters, "begin"), (reads, "take"), (waits, "finish"), (rests, "nothing")]
)
async def test_a_closed_coroutine_ends_its_request(use: Any, at: str, until: Until) -> None:
    """A finalizer closes it, and cannot wait."""
    link, there = wires(1)["replica-0"], asyncio.Event()
    async with RemoteEngine({"replica-0": link}) as remote:
        link.hold = {at}
        work = use(remote, there)
        taking = asyncio.ensure_future(turns(work))
        await until(lambda: at in link.calls or there.is_set())
        taking.cancel()
        await asyncio.wait([taking])
        work.close()
        await until(lambda: "abort" in link.calls and not link.replica.requests)
        # Nobody holds up whoever waits for the last request.
        await asyncio.wait_for(remote.remove("replica-0", drain_timeout=60.0), 5.0)


async def test_a_stream_that_did_not_begin_may_be_started_again() -> None:
    """As one of an engine: it was refused for load, here and at the replica."""
    link = wires(1, max_requests=1)["replica-0"]
    refusing = Refusing(link)
    async with RemoteEngine({"replica-0": refusing}) as remote:
        stream = remote.stream("hello", max_tokens=3)
        async with remote.stream("hello", max_tokens=400) as other:
            await anext(other)
            with pytest.raises(Overloaded, match="all replicas are full"):
                await anext(stream)
        first = stream.request_id
        refusing.refuses = True
        for _ in range(2):
            with pytest.raises(Overloaded, match="at the replica"):
                await stream
        refusing.refuses = False
        assert len((await stream).token_ids) == 3
        assert stream.request_id == f"{first}.3"
        # The replica is free for the next one.
        assert len((await remote.generate("hello", max_tokens=3)).token_ids) == 3


async def test_a_session_goes_on_after_a_refused_answer() -> None:
    refusing = Refusing(wires(1)["replica-0"])
    async with RemoteEngine({"replica-0": refusing}) as remote:
        session = remote.session(max_tokens=3)
        answer = session.stream("hello")
        refusing.refuses = True
        with pytest.raises(Overloaded):
            await answer
        refusing.refuses = False
        await answer
        assert len(session.messages) == 2


class Refusing:
    """A link whose replica has no room when a test says so."""

    def __init__(self, inner: Wire) -> None:
        self.inner = inner
        self.refuses = False

    async def call(self, method: str, *args: Any) -> Any:
        if method == "begin" and self.refuses:
            raise Overloaded("at the replica")
        return await self.inner.call(method, *args)
