"""Sessions and pins of replicas are those of an engine; sessions outlive a replica."""

from __future__ import annotations

import asyncio
import gc
from typing import Any

import pytest
from remote.wire import SECRET, TEMPLATE, Wire, wires
from support import Until

from asyncinfer import Engine, EngineClosed, InvalidRequest, StreamBusy
from asyncinfer.engine import SpokenMessages
from asyncinfer.remote import RemoteEngine, Replica, ReplicaLost
from asyncinfer.remote import replica as replica_module
from asyncinfer.remote.link import Held
from asyncinfer.testing import FakeModel, Said, ScriptedModel, StepGate

pytestmark = pytest.mark.anyio
BLOCK = 16
LOOK = {"name": "look", "parameters": {"type": "object", "properties": {}}}
LONG = "hello " * 20


@pytest.fixture(params=["asyncio"])
def anyio_backend(request: pytest.FixtureRequest) -> Any:
    """Ray's loop: no other has replicas."""
    return request.param


def answer(messages: list[dict[str, str]]) -> Said | str:
    last = messages[-1]
    if last["role"] == "tool":
        return f"I saw {last['content']}."
    if "look" in last["content"]:
        return Said(reasoning="I have to.", tool_calls=[("look", {})])
    return Said(f"You said: {last['content']}", reasoning="Well.")


def scripted(count: int = 2, **options: Any) -> dict[str, Wire]:
    """Links to replicas of a model that says what it heard."""
    given = {"block_size": BLOCK, "prefix_secret": SECRET, **options}
    return {
        f"replica-{index}": Wire(lambda: Replica(ScriptedModel(answer), **given))
        for index in range(count)
    }


def begun(links: dict[str, Wire]) -> list[int]:
    return sorted(link.calls.count("begin") for link in links.values())


async def test_twenty_turns_compute_each_token_once(until: Until) -> None:
    links = scripted()
    async with RemoteEngine(links) as remote:
        async with remote.session(system="Be brief.", tools=[LOOK]) as chat:
            known = 0

            def check(usage: Any) -> None:
                """All full blocks of what was there; the last token was never computed."""
                nonlocal known
                assert usage.cached_tokens >= (known - 1) // BLOCK * BLOCK
                known = usage.prompt_tokens + usage.completion_tokens - 1

            for turn in range(20):
                done = await chat.send(f"please look {turn}" if turn % 2 else f"hello {turn}")
                check(done.usage)
                if done.tool_calls:
                    told = {"role": "tool", "tool_call_id": done.tool_calls[0].id}
                    chat.append({**told, "content": "a cat"})
                    async with chat.stream() as stream:
                        text = "".join([chunk.text async for chunk in stream])
                    assert text == chat.messages[-1]["content"] == "I saw a cat."
                    check(stream.usage)
            before = known
            fork = chat.fork()
            check((await fork.send("one way")).usage)
            known = before
            check((await chat.send("another way")).usage)
            known = before
            chat.rewind(2)
            check((await chat.send("a third way")).usage)
            assert fork.messages[-1]["content"] == "You said: one way"
            assert chat.messages[-1]["content"] == "You said: a third way"
            # One replica had them all, also those of the fork.
            assert begun(links) == [0, 33]
            assert sum(link.calls.count("wait_for_tool") for link in links.values()) == 10
        held = (before - 1) // BLOCK
        # The fork keeps what it shares with the session that is closed.
        await until(lambda: held <= remote.stats().blocks_pinned <= held + 4)
        fork.close()
        await until(lambda: not remote.stats().blocks_pinned)


async def test_a_conversation_goes_on_elsewhere_to_the_same_tokens() -> None:
    links = wires(2)
    options = {"max_tokens": 24, "temperature": 1.0, "seed": 3}
    async with Engine(FakeModel(template=TEMPLATE), block_size=4) as local:
        here = local.session(**options)
        expected = [await here.send(text) for text in ("one", "two", "three")]
        # A text, tokenised, would be other tokens.
        assert local.tokenizer.encode(expected[0].text) != [*expected[0].token_ids]
    async with RemoteEngine(links) as remote, remote.session(**options) as chat:
        answers = [await chat.send("one")]
        first = next(link for link in links.values() if "begin" in link.calls)
        stream = chat.stream("two")
        await stream.__aenter__()
        await first.kill()
        with pytest.raises(ReplicaLost):
            await stream
        # What was lost is no part of the conversation.
        assert len(chat.messages) == 2
        answers += [await chat.send("two")]
        # Nothing was there; from then on all is.
        assert answers[-1].usage.cached_tokens == 0
        answers += [await chat.send("three")]
        known = answers[1].usage.prompt_tokens + 24 - 1
        assert answers[-1].usage.cached_tokens >= (known - 1) // 4 * 4
        assert begun(links) == [2, 2]
    for one, two in zip(answers, expected, strict=True):
        assert one.choices == two.choices
        assert one.usage.prompt_tokens == two.usage.prompt_tokens


async def test_a_replica_that_a_conversation_has_left_keeps_nothing_of_it(until: Until) -> None:
    links = scripted()
    async with RemoteEngine(links, routing="round-robin") as remote, remote.session() as chat:
        for _ in range(3):
            await chat.send(LONG)
        assert begun(links) == [1, 2]
        for link in links.values():
            news = await link.replica.news()
            while news.stats.blocks_pinned and link.calls.count("begin") == 1:
                news = await link.replica.news()
            assert bool(news.stats.blocks_pinned) == (link.calls.count("begin") == 2)


async def test_tenants_share_nothing_and_a_session_is_kept_for_its_ttl(until: Until) -> None:
    async with RemoteEngine(scripted(1)) as remote:
        first = remote.session(cache_scope="a", ttl=0.001)
        second = remote.session(cache_scope="b")
        one, two = await first.send(LONG), await second.send(LONG)
        assert one.usage.cached_tokens == two.usage.cached_tokens == 0
        assert one.text == two.text
        held = (two.usage.prompt_tokens + two.usage.completion_tokens - 1) // BLOCK
        while remote.stats().blocks_pinned != held:
            # What an engine does with its time, it does beside requests.
            await remote.generate([1, 2], max_tokens=1)
            await asyncio.sleep(0)
        assert (await first.send("and?")).usage.cached_tokens >= held * BLOCK
        del first, second
        gc.collect()
        await until(lambda: not remote.stats().blocks_pinned)


async def test_nothing_is_kept_for_a_client_that_is_gone(
    monkeypatch: pytest.MonkeyPatch, until: Until
) -> None:
    monkeypatch.setattr(replica_module, "LEASE", 0.2)
    link = scripted(1)["replica-0"]
    await link.call("introduce")
    prompt = SpokenMessages([{"role": "user", "content": LONG}])
    told = await link.call("begin", "req-1", prompt, {}, Held("a", None, None))
    assert len(told.prompt_ids) == told.prompt_tokens
    await link.call("finish", "req-1")
    await link.call("pin", "req-2", [*range(100)], {}, Held("b", None, None))
    assert (await link.call("news")).stats.blocks_pinned > 100 // BLOCK
    while (await link.replica.news()).stats.blocks_pinned:
        await asyncio.sleep(0.25)  # without a call for news
    await link.call("close", 0.0)


async def test_a_session_is_used_and_misused_as_an_engines(until: Until) -> None:
    cases: list[tuple[dict[str, Any], str]] = [
        ({"max_token": 4}, "max_token=4: .*did you mean max_tokens"),
        ({"n": 2}, "one answer at a time"),
        ({"tools": 3}, "tools"),
        ({"system": 3}, "system"),
        ({"messages": "hello"}, "must be a list of messages"),
        ({"messages": [{"content": "hello"}]}, r"messages\[0\].role"),
        ({"cache_scope": 3}, "cache_scope"),
        ({"ttl": 0}, "ttl"),
        ({"adapter": "a"}, "adapter"),
    ]
    remote = RemoteEngine(scripted())
    for open_it in (remote.session, remote.pin):
        with pytest.raises(EngineClosed):
            open_it([])
    async with remote:
        for options, told in cases:
            with pytest.raises(InvalidRequest, match=told):
                remote.session(**options)
        chat = remote.session([{"role": "user", "content": "a"}])
        async with chat.stream("b") as stream:
            await anext(stream)
            with pytest.raises(StreamBusy):
                await chat.send("c")
        assert len(chat.messages) == 1, "one that is left before its end is no answer"
        # An answer that was read is there as a whole, too.
        stream = chat.stream("d")
        text = "".join([chunk.text async for chunk in stream])
        assert (await stream).text == text == "You said: d"
        again = remote.stream("e")
        assert "".join([chunk.text async for chunk in again]) == (await again).text
        closed = chat.fork()
        closed.close()
        with pytest.raises(EngineClosed, match="the session is closed"):
            await closed.send("e")
        # Closed before its request has begun: it is answered, and not kept.
        late = remote.session()
        answering = asyncio.ensure_future(late.send(LONG))
        await asyncio.sleep(0)
        late.close()
        assert (await answering).text == f"You said: {LONG}"
        chat.close()
        await until(lambda: remote.stats().finished and not remote.stats().blocks_pinned)
        chat = remote.session()
    with pytest.raises(EngineClosed):
        await chat.send("f")
    chat.close()
    async with RemoteEngine({"a": Wire(lambda: Replica(FakeModel()))}) as plain:
        with pytest.raises(InvalidRequest, match="no chat template"):
            plain.session()


async def test_a_pinned_prompt_is_kept_by_one_replica(until: Until) -> None:
    prompt = [*range(100)]
    links = scripted()
    async with RemoteEngine(links) as remote:
        async with remote.pin(prompt) as pin:
            assert pin.prompt_tokens == 100
            await until(lambda: remote.stats().blocks_pinned == 6)
            for index in range(4):
                done = await remote.generate([*prompt, index], max_tokens=1)
                assert done.usage.cached_tokens == 96
        await until(lambda: not remote.stats().blocks_pinned)
        assert begun(links) == [0, 4]
        dropped = await remote.pin(prompt).__aenter__()
        await until(lambda: remote.stats().blocks_pinned == 6)
        del dropped
        gc.collect()
        await until(lambda: not remote.stats().blocks_pinned)
        for bad in ({"ttl": -1}, {"cache_scope": 3}, {"adapter": "a"}, {"deadline": 0}):
            with pytest.raises(InvalidRequest, match=next(iter(bad))):
                remote.pin(prompt, **bad)  # type: ignore[arg-type]
        with pytest.raises(InvalidRequest, match="prompt"):
            await remote.pin([]).__aenter__()
        await remote.pin(prompt).__aenter__()


async def test_a_pin_that_is_left_before_it_is_computed_keeps_nothing(until: Until) -> None:
    links = wires(1, gates := [StepGate(closed=True)])
    async with RemoteEngine(links) as remote:
        entering = asyncio.ensure_future(remote.pin("hello" * 9).__aenter__())
        await until(lambda: links["replica-0"].replica.requests)
        entering.cancel()
        with pytest.raises(asyncio.CancelledError):
            await entering
        await until(lambda: not links["replica-0"].replica.requests)
        # One that is closed while it is computed is computed, and not kept either.
        pin = remote.pin("hello" * 9)
        entering = asyncio.ensure_future(pin.__aenter__())
        await until(lambda: links["replica-0"].replica.requests)
        calls = links["replica-0"].calls
        released = calls.count("release")
        pin.close()
        # It is asked for news beside that.
        await until(lambda: calls.count("release") > released)
        gates[0].open()
        await entering
        await remote.generate("x", max_tokens=1)
        # The first one may have been computed already when it was left.
        await until(lambda: remote.stats().finished + remote.stats().aborted == 3)
        await until(lambda: not remote.stats().blocks_pinned)
