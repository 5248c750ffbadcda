"""Nothing of a replica, and nobody who waits for one, outlives its end."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator
from typing import Any

import pytest
from remote.wire import Wire, wires
from support import Until

from asyncinfer import (
    DeadlineExceeded,
    EngineClosed,
    InvalidConfig,
    ModelLoadError,
    Overloaded,
)
from asyncinfer.cache import BlockHasher
from asyncinfer.engine import EngineTokenizer
from asyncinfer.remote import RemoteEngine, Replica, ReplicaLost
from asyncinfer.remote import dispatcher as dispatcher_module
from asyncinfer.remote import engine as engine_module
from asyncinfer.remote.prompt_keys import MOST_KEYS, PromptKeys
from asyncinfer.testing import FakeModel, StepGate

pytestmark = pytest.mark.anyio


@pytest.fixture(params=["asyncio"])
def anyio_backend(request: pytest.FixtureRequest) -> Any:
    """Ray's loop: no other has replicas."""
    return request.param


async def ends_cancelled(task: asyncio.Future[Any]) -> None:
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task


@pytest.mark.parametrize("cancelled", [False, True])
async def test_a_deadline_passes_while_a_prompt_is_routed(
    cancelled: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    go, of = asyncio.Event(), PromptKeys.of

    async def held(self: PromptKeys, *args: Any) -> list[bytes]:
        await go.wait()
        return await of(self, *args)

    monkeypatch.setattr(PromptKeys, "of", held)
    links = wires(2, max_requests=1)
    async with RemoteEngine(links) as remote:
        stream = remote.stream("hello", deadline=0.05)
        reading = asyncio.ensure_future(anext(stream))
        await asyncio.sleep(0.06)
        if cancelled:
            # It counts from the first start.
            await ends_cancelled(reading)
            reading = asyncio.ensure_future(anext(stream))
        go.set()
        with pytest.raises(DeadlineExceeded, match="passed on the way"):
            await reading
        assert all("begin" not in link.calls for link in links.values())
        # Its place is free.
        await asyncio.gather(*(remote.generate("hello", max_tokens=1) for _ in links))


async def test_a_close_that_is_cancelled_closes_at_once(until: Until) -> None:
    gates = [StepGate(), StepGate()]
    links = wires(2, gates)
    remote = RemoteEngine(links)
    await remote.__aenter__()
    streams = [remote.stream("hello"), remote.stream("hello")]
    for stream in streams:
        await stream.__aenter__()
    closing = asyncio.ensure_future(remote.aclose(drain_timeout=60.0))
    await until(lambda: remote.health().state == "dead")
    await ends_cancelled(closing)
    assert [link.calls.count("close") for link in links.values()] == [1, 1]
    assert remote.health().state == "closed"
    for stream in streams:
        # You closed it, and it is not lost.
        with pytest.raises(EngineClosed, match="the engine is closed"):
            await anext(stream)
    await remote.aclose()


async def test_a_close_hastens_a_removal(until: Until) -> None:
    links = wires(1)
    async with RemoteEngine(links) as remote:
        stream = remote.stream("hello")
        await stream.__aenter__()
        removing = asyncio.ensure_future(remote.remove("replica-0", drain_timeout=60.0))
        await until(lambda: remote.health().state == "dead")
        await remote.aclose(drain_timeout=0.0)
        assert links["replica-0"].calls[-1] == "close"
        await removing
        await stream.aclose()


async def test_nobody_waits_for_a_replica_that_was_removed(
    monkeypatch: pytest.MonkeyPatch, until: Until
) -> None:
    links = wires(1, [gate := StepGate()])
    async with RemoteEngine(links) as remote:
        gate.close()
        stream = remote.stream("hello")
        await stream.__aenter__()
        reading = asyncio.ensure_future(stream.__anext__())
        await until(lambda: "take" in links["replica-0"].calls)
        links["replica-0"].mute = True
        monkeypatch.setattr(dispatcher_module, "SILENT", 0.05)
        with pytest.raises(ReplicaLost, match="did not close"):
            await remote.remove("replica-0", drain_timeout=0.0)
        with pytest.raises(ReplicaLost):
            await asyncio.wait_for(reading, 5.0)
    gate.open()
    await links["replica-0"].replica.close(0.0)


async def test_whoever_asked_before_a_replica_began_anew_hears_of_it(until: Until) -> None:
    links = wires(1, [StepGate()])
    link = links["replica-0"]
    async with RemoteEngine(links) as remote:
        stream = remote.stream("hello")
        await stream.__aenter__()
        link.hold = {"take", "introduce"}
        reading = asyncio.ensure_future(stream.__anext__())
        await until(lambda: "take" in link.calls)
        before = link.replica
        link.revive()
        # It answers nothing but news while it opens.
        with pytest.raises(ReplicaLost, match="has begun anew"):
            await asyncio.wait_for(reading, 5.0)
        link.hold = set()
        await before.close(0.0)


@pytest.mark.parametrize("how", ["fails", "is cancelled", "is unlike"])
async def test_an_opening_that_fails_leaves_no_replica_open(how: str, until: Until) -> None:
    links = wires(3)
    links["replica-1"].hold = {"introduce"}
    if how == "fails":
        broken = FakeModel(load_error=ModelLoadError("no such model"))
        links["replica-2"] = Wire(lambda: Replica(broken))
    elif how == "is unlike":
        links["replica-2"] = Wire(lambda: Replica(FakeModel(), prefix_secret=b"x" * 16))
    remote = RemoteEngine(links)
    opening = asyncio.ensure_future(remote.__aenter__())
    if how == "is cancelled":
        await until(lambda: sum("news" in link.calls for link in links.values()) == 2)
        await ends_cancelled(opening)
    else:
        with pytest.raises((ModelLoadError, InvalidConfig)):
            await opening
    for link in links.values():
        await until(lambda link=link: "close" in link.calls)
    assert remote.health().state == "closed"


async def test_a_stream_that_is_cancelled_while_it_begins_is_aborted(until: Until) -> None:
    links = wires(1)
    link = links["replica-0"]
    async with RemoteEngine(links) as remote:
        link.hold = {"begin"}
        stream = remote.stream("hello")
        entering = asyncio.ensure_future(stream.__aenter__())
        await until(lambda: "begin" in link.calls)
        await ends_cancelled(entering)
        await until(lambda: "abort" in link.calls)
        # It holds up nobody who waits for the last request.
        await asyncio.wait_for(remote.remove("replica-0", drain_timeout=60.0), 5.0)


async def test_a_deadline_holds_for_other_methods(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engine_module, "GRACE", 0.05)
    links = wires(1)
    async with RemoteEngine(links) as remote:
        links["replica-0"].hold = {"whole"}
        with pytest.raises(DeadlineExceeded):
            await asyncio.wait_for(remote.best_of("x", deadline=0.05), 5.0)


async def test_who_is_refused_is_not_tokenised(monkeypatch: pytest.MonkeyPatch) -> None:
    links = wires(2, max_requests=1)
    async with RemoteEngine(links) as remote:
        streams = [remote.stream("x", max_tokens=2) for _ in range(2)]
        for stream in streams:
            await stream.__aenter__()

        def encode(*_: Any, **__: Any) -> list[int]:
            raise AssertionError("tokenised")

        monkeypatch.setattr(EngineTokenizer, "encode", encode)
        with pytest.raises(Overloaded, match="all replicas are full"):
            await remote.generate("x" * 3000)
        for stream in streams:
            await stream.aclose()


async def test_prompts_that_nobody_waits_for_are_few(
    monkeypatch: pytest.MonkeyPatch, until: Until
) -> None:
    """Callers with short timeouts leave work behind that cannot be stopped."""
    began, goes_on = [], threading.Event()

    def encode(*_: Any, **__: Any) -> list[int]:
        began.append(None)
        assert goes_on.wait(60.0)
        return [1] * 8

    async with RemoteEngine(wires(2)) as remote:
        monkeypatch.setattr(EngineTokenizer, "encode", encode)
        try:
            hasty = [asyncio.ensure_future(remote.generate("x" * 3000)) for _ in range(2)]
            await until(lambda: len(began) == 2)
            for task in hasty:
                await ends_cancelled(task)
            # The next ones are answered all the same.
            await remote.generate("x" * 3000, max_tokens=1)
            assert len(began) == 2
        finally:
            goes_on.set()
        await until(lambda: not remote.stats().running)


async def test_threads_that_make_keys_end_with_their_engine(until: Until) -> None:
    async with RemoteEngine(wires(2)) as remote:
        await asyncio.gather(*(remote.generate([5] * 3000, max_tokens=1) for _ in range(2)))
        assert _making_keys()
    await until(lambda: not _making_keys())
    keys = PromptKeys(EngineTokenizer.__new__(EngineTokenizer), BlockHasher(4, b""))
    keys.close()
    assert await keys.of([5] * 3000, {}) == []


class Ids(list[int]):
    """Token ids that are too many to go through on an event loop."""

    def __iter__(self) -> Iterator[int]:
        raise AssertionError("gone through")


async def test_a_long_prompt_has_few_keys_and_leaves_the_loop_its_turns() -> None:
    async with RemoteEngine(wires(2)) as remote:
        keys = PromptKeys(remote.tokenizer, BlockHasher(4, b""))
        try:
            found = await keys.of(Ids([5] * (8 * MOST_KEYS)), {})
            assert found == await keys.of([5] * (4 * MOST_KEYS), {})
            assert len(found) == MOST_KEYS
        finally:
            keys.close()


def _making_keys() -> list[str]:
    names = (thread.name for thread in threading.enumerate())
    return [name for name in names if name.startswith("asyncinfer-keys")]
