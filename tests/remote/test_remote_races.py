"""Replicas that come, go and are out of reach for a moment harm no request and leave nothing."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from remote.wire import Wire, wires
from support import Until

from asyncinfer import EngineClosed, InvalidConfig, Overloaded
from asyncinfer.remote import RemoteEngine, RemoteStream, ReplicaLost
from asyncinfer.testing import StepGate

pytestmark = pytest.mark.anyio


@pytest.fixture(params=["asyncio"])
def anyio_backend(request: pytest.FixtureRequest) -> Any:
    """Ray's loop: no other has replicas."""
    return request.param


class Flaky:
    """A link on which the next calls for news fail, so many as a test says."""

    def __init__(self, inner: Wire) -> None:
        self.inner = inner
        self.failures = 0

    async def call(self, method: str, *args: Any) -> Any:
        if method == "news" and self.failures:
            self.failures -= 1
            raise ReplicaLost("a packet was lost")
        return await self.inner.call(method, *args)


async def tokens(stream: RemoteStream) -> int:
    return sum([len(chunk.token_ids) async for chunk in stream])


async def test_requests_outlive_a_failed_call_for_news(until: Until) -> None:
    (inner,) = wires(1, [gate := StepGate()], max_requests=1).values()
    link = Flaky(inner)
    async with RemoteEngine({"replica-0": link}) as remote:
        gate.close()
        stream = remote.stream("hello", max_tokens=50, ignore_eos=True)
        reading = asyncio.ensure_future(tokens(stream))
        try:
            await until(lambda: "take" in inner.calls)
            link.failures = 1
            await until(lambda: remote.health().state == "dead")
            await until(lambda: remote.health().state != "dead")
            # It still has that request.
            with pytest.raises(Overloaded, match="are full"):
                await remote.generate("x")
        finally:
            gate.open()
        assert await reading == 50
        await remote.generate("x", max_tokens=1)


@pytest.mark.parametrize("lost", [False, True])
async def test_a_removal_waits_for_requests_though_a_call_for_news_failed(
    lost: bool, until: Until
) -> None:
    (inner,) = wires(1).values()
    link = Flaky(inner)
    async with RemoteEngine({"replica-0": link}) as remote:
        stream = remote.stream("hello", buffer=8, max_tokens=500, ignore_eos=True)
        first = len((await anext(stream)).token_ids)
        if not lost:
            removing = asyncio.ensure_future(remote.remove("replica-0", drain_timeout=60.0))
            await until(lambda: remote.health().state == "dead")
        link.failures = 1
        await until(lambda: not link.failures)
        known = inner.calls.count("news")
        if lost:
            removing = asyncio.ensure_future(remote.remove("replica-0", drain_timeout=60.0))
        await until(lambda: removing.done() or inner.calls.count("news") > known)
        assert await tokens(stream) == 500 - first
        await removing


async def test_a_replica_that_stays_lost_holds_no_removal_up(until: Until) -> None:
    (inner,) = wires(1).values()
    link = Flaky(inner)
    async with RemoteEngine({"replica-0": link}) as remote:
        stream = remote.stream("hello", buffer=8, max_tokens=3000)
        await stream.__aenter__()
        link.failures = 1 << 30
        await asyncio.wait_for(remote.remove("replica-0", drain_timeout=60.0), 5.0)
        with pytest.raises(ReplicaLost, match="was removed"):
            await tokens(stream)


async def test_one_of_two_additions_of_a_name_is_refused() -> None:
    first, one, two = wires(3).values()
    async with RemoteEngine({"first": first}) as remote:
        added = await asyncio.gather(
            remote.add("x", one), remote.add("x", two), return_exceptions=True
        )
        assert added[0] is None
        assert isinstance(added[1], InvalidConfig)
        assert two.calls == []
    assert one.calls[-1] == "close"


class ClosesAsItOpens:
    """A link to a replica that opens in the turn in which the engine begins to close."""

    def __init__(self, inner: Wire) -> None:
        self.inner = inner
        self.engine: RemoteEngine | None = None
        self.closing: asyncio.Future[None] | None = None

    async def call(self, method: str, *args: Any) -> Any:
        result = await self.inner.call(method, *args)
        if method == "introduce":
            assert self.engine is not None
            self.closing = asyncio.ensure_future(self.engine.aclose(drain_timeout=0.0))
        return result


async def test_a_close_in_the_turn_in_which_a_replica_has_opened() -> None:
    first, second = wires(2).values()
    link = ClosesAsItOpens(second)
    async with RemoteEngine({"first": first}) as remote:
        link.engine = remote
        with pytest.raises(EngineClosed, match="second: closed while it was opening"):
            await remote.add("second", link)
        assert link.closing is not None
        await link.closing
        assert remote.health().state == "closed"
        assert [each.calls[-1] for each in (first, second)] == ["close", "close"]


async def test_a_replica_is_not_added_while_the_others_close(until: Until) -> None:
    links = wires(2)
    first, second = links.values()
    async with RemoteEngine({"first": first}) as remote:
        async with remote.stream("hello", buffer=8, max_tokens=3000):
            closing = asyncio.ensure_future(remote.aclose(drain_timeout=60.0))
            await until(lambda: remote.health().state == "dead")
            with pytest.raises(EngineClosed):
                await remote.add("second", second)
        await closing
        with pytest.raises(EngineClosed):
            await remote.add("second", second)
    assert second.calls == []


async def test_an_engine_is_entered_once() -> None:
    links = wires(1)
    async with RemoteEngine(links) as remote:
        async with remote.stream("hello", max_tokens=50, ignore_eos=True) as stream:
            with pytest.raises(EngineClosed, match="opened once"):
                async with remote:
                    raise AssertionError("it opened")
            assert remote.health().state == "open"
            assert await tokens(stream) == 50
    with pytest.raises(EngineClosed, match="opened once"):
        await remote.__aenter__()
    assert links["replica-0"].calls.count("introduce") == 1


async def test_an_engine_that_did_not_open_may_be_entered_again() -> None:
    (link,) = wires(1).values()
    link.dead.set()
    remote = RemoteEngine({"replica-0": link})
    with pytest.raises(ReplicaLost, match="refused"):
        await remote.__aenter__()
    link.revive()
    async with remote:
        await remote.generate("x", max_tokens=1)
