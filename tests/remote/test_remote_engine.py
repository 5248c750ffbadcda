"""Answers of replicas are those of an engine; replicas come, go, die and fall silent."""

from __future__ import annotations

import asyncio
from typing import Any

import anyio
import anyio.lowlevel
import pytest
from remote.wire import TEMPLATE, Wire, wires
from support import Until

from asyncinfer import (
    DeadlineExceeded,
    Engine,
    EngineClosed,
    InvalidConfig,
    InvalidRequest,
    ModelLoadError,
    Overloaded,
    RequestFailed,
    StreamBusy,
)
from asyncinfer.remote import RemoteEngine, Replica, ReplicaLost
from asyncinfer.remote import dispatcher as dispatcher_module
from asyncinfer.remote import replica as replica_module
from asyncinfer.testing import FakeModel, StepGate

pytestmark = pytest.mark.anyio


@pytest.fixture(params=["asyncio"])
def anyio_backend(request: pytest.FixtureRequest) -> Any:
    """Ray's loop: no other has replicas."""
    return request.param


def open_local(**options: Any) -> Engine:
    return Engine(FakeModel(template=TEMPLATE), block_size=4, **options)


def chunks_of(found: list[Any]) -> tuple[Any, ...]:
    texts = "".join(chunk.text for chunk in found)
    ids = [token for chunk in found for token in chunk.token_ids]
    scores = [score for chunk in found for score in chunk.logprobs]
    return texts, ids, scores, found[-1].finish_reason


@pytest.mark.parametrize(
    ("prompt", "options"),
    [
        ("hello", {"max_tokens": 40, "seed": 3}),
        ([5, 6, 7], {"max_tokens": 9, "temperature": 0.0, "logprobs": 2}),
        ([{"role": "user", "content": "hello"}], {"max_tokens": 20, "seed": 1}),
        ("two", {"n": 2, "max_tokens": 5, "seed": 4, "prompt_logprobs": 1}),
    ],
)
async def test_answers_are_those_of_an_engine(prompt: Any, options: dict[str, Any]) -> None:
    async with open_local() as local, RemoteEngine(wires()) as remote:
        here, there = (
            await local.generate(prompt, **options),
            await remote.generate(prompt, **options),
        )
        assert there.choices == here.choices
        assert there.prompt_logprobs == here.prompt_logprobs
        assert there.usage.prompt_tokens == here.usage.prompt_tokens
        if options.get("n", 1) == 1:
            async with (
                local.stream(prompt, **options) as one,
                remote.stream(prompt, **options) as two,
            ):
                read = chunks_of([chunk async for chunk in one])
                assert chunks_of([chunk async for chunk in two]) == read
            assert one.usage is not None
            assert two.usage is not None
            assert two.usage.completion_tokens == one.usage.completion_tokens
            assert two.prompt_tokens == one.prompt_tokens
        assert remote.tokenizer.encode("hello") == local.tokenizer.encode("hello")
        assert remote.tokenizer.encode_chat([{"role": "user", "content": "x"}])
        assert remote.model == local.model
        assert remote.default_params == local.default_params


async def test_what_is_bad_is_refused_as_an_engine_does() -> None:
    async with RemoteEngine(wires(max_requests=2)) as remote:
        for bad, told in (
            ({"max_token": 3}, "max_token=3: is no option"),
            ({"top_p": 7.0}, "top_p=7.0"),
            ({"adapter": "a"}, "adapter='a'"),
            ({"deadline": "soon"}, "deadline='soon'"),
            ({"deadline": float("nan")}, "deadline=nan"),
            ({"cache_scope": 5}, "cache_scope=5"),
            ({"priority": 1 << 40}, "priority="),
        ):
            with pytest.raises(InvalidRequest, match=told):
                remote.stream("x", **bad)
        with pytest.raises(InvalidRequest, match="cache_scope=5"):
            await remote.score("abcd", ["e"], cache_scope=5)
        for ids in ([1 << 70] * 4, [-1] * 4, [True] * 4):
            with pytest.raises(InvalidRequest, match=r"^prompt\[0\]="):
                await remote.generate(ids)
        with pytest.raises(InvalidRequest, match=r"^prompt\[0\]=999999"):
            await remote.generate([999_999])
        with pytest.raises(InvalidRequest, match=r"^prompt="):
            await remote.generate(object)
        async with anyio.create_task_group() as group:
            streams = [remote.stream("x", max_tokens=2) for _ in range(4)]
            for stream in streams:
                group.start_soon(stream.__aenter__)
        with pytest.raises(Overloaded, match="all replicas are full"):
            await remote.generate("x")
        for stream in streams:
            await stream.aclose()
        await remote.generate("x", max_tokens=1)
    with pytest.raises(EngineClosed):
        await remote.generate("x")
    assert remote.health().state == "closed"


async def test_replicas_that_are_not_alike_are_refused() -> None:
    with pytest.raises(InvalidConfig, match="links"):
        RemoteEngine({})
    with pytest.raises(InvalidConfig, match="routing='best'"):
        RemoteEngine(wires(), routing="best")  # type: ignore[arg-type]
    with pytest.raises(InvalidConfig, match="prefix_secret"):
        Engine(FakeModel(), prefix_secret=b"short")
    other = Wire(lambda: Replica(FakeModel(), prefix_secret=b"another secret, 16"))
    async with RemoteEngine(wires(1)) as remote:
        with pytest.raises(InvalidConfig, match="prefix_secret of the others"):
            await remote.add("other", other)
        await other.replica.close(0.0)
    broken = Wire(lambda: Replica(FakeModel(load_error=ModelLoadError("no such model"))))
    with pytest.raises(ModelLoadError, match="no such model"):
        async with RemoteEngine({"a": broken}):
            raise AssertionError("it opened")


async def test_prompts_go_where_their_beginning_is(until: Until) -> None:
    links = wires()
    async with RemoteEngine(links) as remote:
        beginnings = ["a" * 64, "b" * 64]
        for text in beginnings:
            await remote.generate(text, max_tokens=1)
        for text in beginnings * 3:
            done = await remote.generate(text + "!", max_tokens=1)
            assert done.usage.cached_tokens == 64
        # Each replica tells of its own blocks, and of those that it gave up.
        await until(lambda: remote.stats().finished == 8)
    begun = [link.calls.count("begin") for link in links.values()]
    assert begun == [4, 4]


async def test_a_cancelled_read_loses_nothing_and_a_left_stream_frees_its_place(
    until: Until,
) -> None:
    gates = [StepGate()]
    async with RemoteEngine(wires(1, gates)) as remote:
        whole = (await remote.generate("hello", max_tokens=30, seed=5)).token_ids
        gates[0].close()
        stream = remote.stream("hello", max_tokens=30, seed=5)
        found: list[int] = []
        await stream.__aenter__()
        for _ in range(3):
            with anyio.move_on_after(0.05) as scope:
                found += (await anext(stream)).token_ids
            assert scope.cancelled_caught
        gates[0].open()
        async with anyio.create_task_group() as group:

            async def second() -> None:
                with pytest.raises(StreamBusy):
                    await anext(stream)

            group.start_soon(second)
            found += (await anext(stream)).token_ids
        async for chunk in stream:
            found += chunk.token_ids
        assert tuple(found) == whole
        async with remote.stream("hello") as left:
            await anext(left)
        with pytest.raises(StopAsyncIteration):
            await anext(left)
        with anyio.move_on_after(0.05):
            await remote.generate("hello")
        await until(lambda: remote.stats().running + remote.stats().waiting == 0)
        await until(lambda: remote.stats().aborted == 2)
        stopped = remote.stream("hello")
        await anext(stopped)
        stopped.stop()
        assert [chunk async for chunk in stopped][-1].finish_reason == "stopped"


async def test_a_slow_reader_holds_its_own_answer_up(until: Until) -> None:
    async with RemoteEngine(wires(1)) as remote:
        async with remote.stream("hello", buffer=8, max_tokens=500) as slow:
            first = await anext(slow)
            await until(lambda: remote.stats().paused == 1)
            await remote.generate("another", max_tokens=20)
            rest = [chunk async for chunk in slow]
        assert sum(len(chunk.token_ids) for chunk in (first, *rest)) == 500


async def test_a_deadline_ends_it_there() -> None:
    gates = [StepGate()]
    async with RemoteEngine(wires(1, gates)) as remote:
        gates[0].close()
        with pytest.raises(DeadlineExceeded):
            await remote.generate("hello", deadline=0.1)
        gates[0].open()
        await remote.generate("hello", max_tokens=1)


async def test_a_replica_that_dies_takes_its_own_streams_alone(until: Until) -> None:
    gates = [StepGate(), StepGate()]
    links = wires(2, gates)
    async with RemoteEngine(links) as remote:
        streams = [remote.stream(f"{index}" * 40, max_tokens=200) for index in range(6)]
        for stream in streams:
            await anext(stream)
        for gate in gates:
            gate.close()
        held = {name: set(link.replica.requests) for name, link in links.items()}
        assert all(held.values())
        gates[0].open()
        await links["replica-0"].kill()
        await until(lambda: remote.health().state == "degraded")
        assert "replica-0: " in remote.health().reasons[0]
        gates[1].open()
        for stream in streams:
            if stream.request_id in held["replica-0"]:
                with pytest.raises(ReplicaLost, match="connection"):
                    async for _ in stream:
                        pass
            else:
                tokens = [token async for chunk in stream for token in chunk.token_ids]
                assert len(tokens) == 199
        # Requests go on beside it, and there when it is back.
        for _ in range(3):
            await remote.generate("x", max_tokens=1)
        await links["replica-1"].kill()
        await until(lambda: remote.health().state == "dead")
        with pytest.raises(Overloaded, match="no replica is up"):
            await remote.generate("x")
        for link in links.values():
            link.revive()
        await until(lambda: remote.health().state == "open")
        for index in range(4):
            assert (await remote.generate(f"{index}" * 40, max_tokens=2)).usage.cached_tokens == 0


async def test_replicas_come_and_go_under_load() -> None:
    links = wires(3)
    async with RemoteEngine({"replica-0": links["replica-0"]}) as remote:
        async with anyio.create_task_group() as group:
            done: list[int] = []

            async def ask(index: int) -> None:
                done.append(
                    (await remote.generate(f"{index}", max_tokens=30)).usage.completion_tokens
                )

            for index in range(40):
                group.start_soon(ask, index)
            await remote.add("replica-1", links["replica-1"])
            await remote.add("replica-2", links["replica-2"])
            for index in range(40):
                group.start_soon(ask, index)
            await anyio.lowlevel.checkpoint()
            # It ends what it has.
            await remote.remove("replica-0")
        assert done == [30] * 80
        with pytest.raises(InvalidConfig, match="replica-0"):
            await remote.remove("replica-0")
        assert remote.health().state == "open"
    assert all(link.calls.count("begin") for link in links.values())


async def test_requests_end_when_nobody_asks_for_news(
    monkeypatch: pytest.MonkeyPatch, until: Until
) -> None:
    """Whoever called is gone."""
    monkeypatch.setattr(replica_module, "LEASE", 0.2)
    link = wires(1)["replica-0"]
    await link.call("introduce")
    await link.call("begin", "req-1", "hello", {})
    await link.call("news")
    await until(lambda: not link.replica.requests)
    with pytest.raises(RequestFailed, match="has begun anew, or ended the request"):
        await link.call("take", "req-1")
    await link.call("close", 0.0)


async def test_nobody_waits_for_a_replica_that_says_nothing(
    monkeypatch: pytest.MonkeyPatch, until: Until
) -> None:
    gates = [StepGate()]
    links = wires(1, gates)
    async with RemoteEngine(links) as remote:
        gates[0].close()
        stream = remote.stream("hello")
        await stream.__aenter__()
        reading = asyncio.ensure_future(stream.__anext__())
        scoring = asyncio.ensure_future(remote.score("ab", ["c"]))
        await until(lambda: "take" in links["replica-0"].calls)
        # Whatever is asked from now on is not answered.
        links["replica-0"].mute = True
        monkeypatch.setattr(dispatcher_module, "SILENT", 0.05)
        for waiting in (reading, scoring):
            with pytest.raises(ReplicaLost, match="replica-0 has said nothing"):
                await waiting
        monkeypatch.undo()
        links["replica-0"].mute = False
        gates[0].open()
        await until(lambda: remote.health().state == "open")
        await remote.generate("hello", max_tokens=1)
        links["replica-0"].mute = True
        monkeypatch.setattr(dispatcher_module, "SILENT", 0.05)
        with pytest.raises(ReplicaLost, match="did not close"):
            await remote.remove("replica-0")
        await remote.aclose()
    monkeypatch.undo()
    await links["replica-0"].replica.close(0.0)


async def test_a_close_while_replicas_open(until: Until) -> None:
    links = wires(2)
    links["replica-1"].mute = True
    remote = RemoteEngine(links)
    opening = asyncio.ensure_future(remote.__aenter__())
    await until(lambda: remote.health().state == "open")
    links["replica-1"].mute = False
    await remote.aclose()
    with pytest.raises(EngineClosed, match="replica-1: closed while it was opening"):
        await opening
    await until(lambda: links["replica-1"].calls == ["introduce", "close"])


async def test_a_stream_that_is_closed_while_it_is_read() -> None:
    gates = [StepGate()]
    async with RemoteEngine(wires(1, gates)) as remote:
        gates[0].close()
        stream = remote.stream("hello")
        await stream.__aenter__()
        reading = asyncio.ensure_future(stream.__anext__())
        await asyncio.sleep(0)
        gates[0].open()
        await stream.aclose()
        with pytest.raises(EngineClosed, match="closed while it was read"):
            await reading


async def test_a_dropped_stream_is_ended(until: Until) -> None:
    async with RemoteEngine(wires(1)) as remote:
        stream = remote.stream("hello")
        await anext(stream)
        with pytest.warns(ResourceWarning, match="was dropped before its end"):
            del stream
        await until(lambda: remote.stats().aborted == 1)


async def test_other_methods() -> None:
    async with open_local() as local, RemoteEngine(wires()) as remote:
        assert await remote.score("ab", ["c", "de"]) == await local.score("ab", ["c", "de"])
        here = await local.best_of("ab", candidates=3, max_tokens=4, seed=1)
        there = await remote.best_of("ab", candidates=3, max_tokens=4, seed=1)
        assert there.choices == here.choices
        with pytest.raises(InvalidRequest, match="beams"):
            await remote.beam_search("ab", beams=0)
