"""Conversations: every token is computed once, and what was said stays what it was."""

from __future__ import annotations

import asyncio
import gc
import weakref
from functools import partial
from typing import Any

import pytest
from support import core_of

from asyncinfer import (
    Engine,
    EngineClosed,
    EngineDead,
    InvalidRequest,
    Overloaded,
    SamplingParams,
    StreamBusy,
    SyncEngine,
)
from asyncinfer.engine import SessionStream
from asyncinfer.testing import FakeModel, Said, ScriptedModel, StepGate
from asyncinfer.text import ChatTemplate

pytestmark = pytest.mark.asyncio
BLOCK = 16
LOOK = {"name": "look", "parameters": {"type": "object", "properties": {}}}


def answer(messages: list[dict[str, str]]) -> Said | str:
    last = messages[-1]
    if last["role"] == "tool":
        return f"I saw {last['content']}."
    if "look" in last["content"]:
        return Said(reasoning="I have to.", tool_calls=[("look", {})])
    return Said(f"You said: {last['content']}", reasoning="Well.")


async def test_twenty_turns_compute_each_token_once() -> None:
    async with Engine(ScriptedModel(answer), block_size=BLOCK) as engine:
        async with engine.session(system="Be brief.", tools=[LOOK]) as chat:
            known = 0
            for turn in range(20):
                done = await chat.send(f"please look {turn}" if turn % 2 else f"hello {turn}")
                # All full blocks of what was there; the last token drawn was never computed.
                assert done.usage.cached_tokens >= (known - 1) // BLOCK * BLOCK
                known = done.usage.prompt_tokens + done.usage.completion_tokens - 1
                if done.tool_calls:
                    call = done.tool_calls[0]
                    chat.append({"role": "tool", "tool_call_id": call.id, "content": "a cat"})
                    done = await chat.send()
                    assert done.text == "I saw a cat."
                    assert done.usage.cached_tokens >= (known - 1) // BLOCK * BLOCK
                    known = done.usage.prompt_tokens + done.usage.completion_tokens - 1
            fork = chat.fork()
            first = await fork.send("one way")
            assert first.usage.cached_tokens >= (known - 1) // BLOCK * BLOCK
            second = await chat.send("another way")
            assert second.usage.cached_tokens >= (known - 1) // BLOCK * BLOCK
            chat.rewind(2)
            third = await chat.send("a third way")
            assert third.usage.cached_tokens >= (known - 1) // BLOCK * BLOCK
            assert [message["content"] for message in chat.messages[-2:]] == [
                "a third way",
                "You said: a third way",
            ]
            assert fork.messages[-1]["content"] == "You said: one way"


async def test_a_program_may_use_its_dicts_again() -> None:
    # The first question was told as the second one.
    async with Engine(ScriptedModel(answer)) as engine:
        asked: dict[str, Any] = {"role": "user", "content": [{"type": "text", "text": "one"}]}
        chat = engine.session([asked])
        asked["content"][0]["text"] = "two"
        await chat.send(asked)
        asked["content"] = "three"
        chat.append(asked)
        asked.clear()
        contents = [message["content"] for message in chat.messages]
        assert [contents[0][0]["text"], contents[1][0]["text"]] == ["one", "two"]
        assert contents[2:] == ["You said: two", "three"]


async def test_what_was_said_stays_the_tokens_it_was() -> None:
    model = ScriptedModel(["first", "second"])
    async with Engine(model) as engine:
        chat = engine.session()
        done = await chat.send("hi")
        told = engine.tokenizer.encode_chat([{"role": "user", "content": "hi"}])
        after = await chat.send("and?")
        # The token that ends an answer, and what the template writes after it.
        rest = engine.tokenizer.encode("<|im_end|>\n<|im_start|>user\nand?<|im_end|>\n")
        rest += engine.tokenizer.encode("<|im_start|>assistant\n")
        assert after.usage.prompt_tokens == len(told) + len(done.token_ids) - 1 + len(rest)
    assert model.prompts[1][1] == {"role": "assistant", "content": "first"}


async def test_reasoning_stays_in_the_conversation() -> None:
    model = ScriptedModel([Said("yes", reasoning="why not"), "ok"])
    async with Engine(model) as engine, engine.session() as chat:
        await chat.send("really?")
        await chat.send("fine")
    assert model.prompts[1][1]["content"] == "<think>\nwhy not\n</think>\n\nyes"


@pytest.mark.parametrize("parts", [False, True])
async def test_an_answer_that_goes_on_with_a_message_is_a_part_of_it(parts: bool) -> None:
    model = ScriptedModel([" Par", "is.", "Rome.", "Oslo."])
    begun = {"type": "text", "text": "It is"}
    async with Engine(model, block_size=BLOCK) as engine, engine.session() as chat:
        chat.append("France?", {"role": "assistant", "content": [begun] if parts else "It is"})
        assert (await chat.send(continue_final_message=True)).text == " Par"
        assert (await chat.send(continue_final_message=True)).text == "is."
        said = {"role": "assistant", "content": "It is Paris."}
        assert chat.messages[1:] == (said,)
        done = await chat.send("Italy?")
        assert done.usage.cached_tokens
        assert model.prompts[-1][1] == said
        await engine.generate(chat.messages[:-1])
        assert model.prompts[-1] == model.prompts[-2]
        chat.rewind(3)
        assert chat.messages == ({"role": "user", "content": "France?"},)


async def test_streams() -> None:
    async with Engine(ScriptedModel(["one", "two", "three", "four"])) as engine:
        chat = engine.session()
        text = ""
        async with chat.stream("a") as stream:
            async for chunk in stream:
                text += chunk.text
        assert text == chat.messages[-1]["content"] == "one"
        before = chat.messages
        async with chat.stream("b") as stream:
            await anext(stream)
            with pytest.raises(StreamBusy):
                await chat.send("c")
            with pytest.raises(StreamBusy):
                chat.append("c")
        assert chat.messages == before, "one that is left before its end is no answer"
        with pytest.raises(InvalidRequest):
            await chat.send("b", tools=3)
        assert chat.messages == before
        assert (await chat.send("b")).text == chat.messages[-1]["content"] == "three"
        chat.rewind(3)
        assert len(chat.messages) == 1
        assert (await chat.stream("d")).text == "four"


def chatting(gate: StepGate) -> FakeModel:
    template = ChatTemplate("{% for m in messages %}{{ m.content }}{% endfor %}")
    return FakeModel(gate=gate, template=template)


async def whole(stream: SessionStream) -> str:
    return "".join([chunk.text async for chunk in stream])


async def test_a_second_reader_ends_no_answer() -> None:
    gate = StepGate(closed=True)
    async with Engine(chatting(gate)) as engine:
        chat = engine.session(max_tokens=3)
        stream = chat.stream("a")
        async with asyncio.TaskGroup() as group:
            reader = group.create_task(whole(stream))
            await asyncio.sleep(0)
            for second in (partial(anext, stream), stream.__aenter__, partial(whole, stream)):
                with pytest.raises(StreamBusy, match="another task is reading"):
                    await second()
            with pytest.raises(StreamBusy, match="is answering"):
                chat.append("too early")
            gate.open()
        assert chat.messages[-1]["content"] == reader.result()


async def test_a_stream_that_was_refused_may_be_begun_again() -> None:
    gate = StepGate(closed=True)
    async with Engine(chatting(gate), max_requests=1) as engine:
        chat = engine.session(max_tokens=3)
        stream = chat.stream("a")
        async with engine.stream([1], max_tokens=1):
            for begin in (stream.__aenter__, partial(anext, stream), partial(whole, stream)):
                with pytest.raises(Overloaded):
                    await begin()
                chat.append()
            with pytest.raises(Overloaded):
                await stream
            gate.open()
        async with stream:
            with pytest.raises(StreamBusy, match="is answering"):
                chat.append("too early")
            text = await whole(stream)
        assert [message["content"] for message in chat.messages] == ["a", text]


async def test_a_stream_begins_in_the_conversation_that_it_was_made_in() -> None:
    async with Engine(ScriptedModel(["one", "two", "three"])) as engine:
        chat = engine.session()
        late = chat.stream("a")
        await chat.send("b", "c", "d")
        for change in (lambda: None, partial(chat.append, "e"), partial(chat.rewind, 3)):
            change()
            for begin in (late.__aenter__, partial(anext, late), partial(whole, late)):
                with pytest.raises(StreamBusy, match="gone on since this stream was made"):
                    await begin()
        await chat.send("f")
        assert [each["content"] for each in chat.messages] == ["b", "c", "f", "two"]


async def test_an_answer_drawn_at_random_is_found_again() -> None:
    """Its text, tokenised, would often be other tokens."""
    async with Engine() as engine, engine.session(temperature=2.0, max_tokens=16, seed=3) as chat:
        known, again = 0, 0
        for turn in range(3):
            done = await chat.send(f"turn {turn}")
            assert done.usage.cached_tokens >= (known - 1) // BLOCK * BLOCK
            known = done.usage.prompt_tokens + done.usage.completion_tokens - 1
            again += engine.tokenizer.encode(done.text) != [*done.token_ids]
        assert again, "the test shows something"


async def test_an_answer_that_is_last_after_a_rewind_stays_the_tokens_it_was() -> None:
    drawn: dict[str, Any] = {"temperature": 2.0, "max_tokens": 16, "seed": 3, "ignore_eos": True}
    async with Engine() as engine, engine.session(**drawn) as chat:
        first = await chat.send("turn 0")
        # After the token that begins a text.
        assert engine.tokenizer.encode(first.text)[1:] != [*first.token_ids]
        second = await chat.send("turn 1")
        chat.rewind(2)
        assert chat.messages[-1]["content"] == first.text
        again = await chat.send("turn 1")
    assert again.usage.prompt_tokens == second.usage.prompt_tokens
    assert again.token_ids == second.token_ids


async def test_without_an_event_loop() -> None:
    with SyncEngine(ScriptedModel(["one", "two", "three"])) as engine:
        with engine.session(system="Be brief.") as chat:
            assert chat.send("a").text == "one"
            fork = chat.fork()
            with chat.stream("b") as stream:
                assert "".join(chunk.text for chunk in stream) == "two"
            chat.append("c")
            chat.rewind(1)
            assert [message["content"] for message in chat.messages][1:] == ["a", "one", "b", "two"]
            assert fork.send("d").text == "three"
        with pytest.raises(EngineClosed):
            chat.send("e")


async def test_misuse() -> None:
    async with Engine(ScriptedModel(["one"])) as engine:
        chat = engine.session()
        with pytest.raises(InvalidRequest, match="one answer at a time"):
            chat.stream("a", n=2)
        with pytest.raises(InvalidRequest, match="one answer at a time"):
            chat.stream("a", params=SamplingParams(n=2))
        with pytest.raises(InvalidRequest, match=r"messages\[0\]=3: must be a mapping"):
            chat.append(3)  # type: ignore[arg-type]
        before = chat.messages
        for field, bad in (
            (r"messages\[1\].role", {"content": "a"}),
            (r"messages\[1\].content", {"role": "tool", "tool_call_id": "1"}),
            (r"messages\[1\].content\[0\].type", {"role": "user", "content": [{"text": "a"}]}),
        ):
            with pytest.raises(InvalidRequest, match=field):
                chat.append("fine", bad)
            with pytest.raises(InvalidRequest, match=field):
                chat.stream("fine", bad)
        assert chat.messages == before, "nothing of a call that was refused"
        with pytest.raises(InvalidRequest, match="must be between 0 and 0"):
            chat.rewind(1)
        chat.close()
        chat.close()
        with pytest.raises(EngineClosed, match="the session is closed"):
            await chat.send("a")
    async with Engine(FakeModel()) as engine:
        with pytest.raises(InvalidRequest, match="no chat template"):
            engine.session()


async def test_bad_options_are_refused_at_once() -> None:
    cases: list[tuple[dict[str, Any], str]] = [
        ({"max_token": 4}, "max_token=4: .*did you mean max_tokens"),
        ({"temperature": -1}, "temperature"),
        ({"n": 2}, "one answer at a time"),
        ({"tools": 3}, "tools"),
        ({"system": 3}, "system"),
        ({"messages": "hello"}, "must be a list of messages"),
        ({"messages": None}, "must be a list of messages"),
        ({"messages": [{"content": "hello"}]}, r"messages\[0\].role"),
        ({"cache_scope": 3}, "cache_scope"),
    ]
    async with Engine(ScriptedModel(["one"])) as engine:
        for options, told in cases:
            with pytest.raises(InvalidRequest, match=told):
                engine.session(**options)


def pinned(engine: Engine) -> int:
    return engine.stats().blocks_pinned


async def until(engine: Engine, blocks: int) -> None:
    """What was asked of the decode thread before a request is done when that has its answer."""
    await engine.generate([1], max_tokens=1)
    assert pinned(engine) == blocks


async def crowd(engine: Engine, blocks: int) -> None:
    """Others, who fill the cache."""
    for number in range(12):
        await engine.generate([number + 100] * (BLOCK * blocks // 2), max_tokens=1)


def small_engine(blocks: int = 24, **options: Any) -> Engine:
    model = ScriptedModel(answer, blocks=blocks)
    return Engine(model, block_size=BLOCK, max_context=BLOCK * 16, **options)


async def test_an_open_session_is_kept_and_a_closed_one_is_not() -> None:
    async with small_engine() as engine:
        async with engine.session() as chat:
            first = await chat.send("hello " * 6)
            held = (first.usage.prompt_tokens + first.usage.completion_tokens - 1) // BLOCK
            assert pinned(engine) == held > 0
            await crowd(engine, 24)
            second = await chat.send("and?")
            assert second.usage.cached_tokens >= held * BLOCK
        await until(engine, 0)
        stats = engine.stats()
        assert stats.blocks_free + stats.blocks_cached == stats.blocks_total
    async with small_engine(pinned_share=0.0) as engine, engine.session() as chat:
        await chat.send("hello " * 6)
        await crowd(engine, 24)
        assert (await chat.send("and?")).usage.cached_tokens == 0


async def test_a_fork_outlives_its_origin() -> None:
    async with small_engine() as engine:
        chat = engine.session()
        await chat.send("hello " * 6)
        before = pinned(engine)
        fork = chat.fork()
        chat.close()
        await crowd(engine, 24)
        assert pinned(engine) == before
        assert (await fork.send("and?")).usage.cached_tokens >= before * BLOCK
        del fork, chat
        gc.collect()
        await until(engine, 0)


async def test_a_session_waits_for_the_tool_that_its_answer_calls() -> None:
    async with small_engine() as engine, engine.session(tools=[LOOK]) as chat:
        cache = core_of(engine).scheduler.cache
        assert cache is not None
        pinning = cache.conversations.pinning
        done = await chat.send("please look")
        await engine.generate([1], max_tokens=1)
        assert (len(pinning["live"]), len(pinning["waiting"])) == (0, 1)
        call = done.tool_calls[0]
        await chat.send({"role": "tool", "tool_call_id": call.id, "content": "a cat"})
        await engine.generate([1], max_tokens=1)
        assert (len(pinning["live"]), len(pinning["waiting"])) == (1, 0)


async def test_after_its_ttl_a_session_is_not_kept() -> None:
    async with small_engine() as engine:
        chat = engine.session(ttl=0.001)
        await chat.send("hello " * 6)
        while pinned(engine):
            await engine.generate([1, 2], max_tokens=1)
        assert (await chat.send("and?")).text == "You said: and?"
        with pytest.raises(InvalidRequest, match="ttl"):
            engine.session(ttl=0)
    async with small_engine() as engine:
        with pytest.raises(InvalidRequest, match="ttl"):
            engine.pin("a", ttl=float("nan"))


async def test_a_pinned_prompt_is_kept() -> None:
    prompt = [*range(100)]
    async with small_engine() as engine:
        async with engine.pin(prompt) as pin:
            assert pin.prompt_tokens == 100
            await until(engine, 6)
            await crowd(engine, 24)
            done = await engine.generate([*prompt, 7], max_tokens=1)
            assert done.usage.cached_tokens == 96
        await until(engine, 0)
        await crowd(engine, 24)
        done = await engine.generate([*prompt, 7], max_tokens=1)
        assert done.usage.cached_tokens == 0
        with pytest.raises(InvalidRequest):
            async with engine.pin([]):
                pass
        dropped = await engine.pin(prompt).__aenter__()
        await until(engine, 6)
        del dropped
        gc.collect()
        await until(engine, 0)


async def test_pins_without_an_event_loop() -> None:
    with SyncEngine(ScriptedModel(answer), block_size=BLOCK) as engine:
        with engine.pin([*range(100)]) as pin:
            assert pin.prompt_tokens == 100
            assert engine.stats().blocks_pinned == 6


async def test_a_session_outlives_its_engine() -> None:
    async with small_engine() as engine:
        chat = engine.session()
        await chat.send("hello")
    with pytest.raises(EngineClosed):
        await chat.send("hello")
    chat.close()
    with pytest.raises(EngineClosed):
        engine.pin("a")


async def test_a_broken_engine_pins_nothing() -> None:
    """Its pages go back, though those who pinned them still hold their pins."""
    engine = await Engine.open(block_size=BLOCK)
    pages = weakref.ref(core_of(engine).runner.kv[0])
    async with engine.pin([*range(1, 101)]) as pin:
        await until(engine, 6)

        def break_down(step: Any) -> None:
            raise OSError("the device fell off")

        core_of(engine).runner.launch = break_down  # type: ignore[method-assign]
        with pytest.raises(EngineDead, match="fell off"):
            await engine.generate([1], max_tokens=1)
        assert pinned(engine) == 0
        await engine.aclose()
        gc.collect()
        assert pages() is None
        assert pin.prompt_tokens == 100
    assert pinned(engine) == 0


async def test_a_closed_engine_pins_nothing() -> None:
    async with small_engine() as engine:
        async with engine.pin([*range(100)]):
            await until(engine, 6)
            await engine.aclose()
            assert pinned(engine) == 0


async def test_without_a_prefix_cache_nothing_is_pinned() -> None:
    async with small_engine(prefix_cache=False) as engine, engine.session() as chat:
        await chat.send("hello")
        assert pinned(engine) == 0
