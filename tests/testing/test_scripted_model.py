"""A model that says what a test has written."""

from __future__ import annotations

from typing import Any

import anyio
import pytest

from asyncinfer import Engine, RequestFailed, SyncEngine
from asyncinfer.testing import Said, ScriptedModel

pytestmark = pytest.mark.asyncio
HI = [{"role": "user", "content": "hi"}]
ADD = {
    "name": "add",
    "parameters": {
        "type": "object",
        "properties": {"a": {"type": "integer"}, "b": {"type": "integer"}},
        "required": ["a", "b"],
        "additionalProperties": False,
    },
}


async def test_answers_in_turn() -> None:
    model = ScriptedModel(["Hello ☃", Said("So.", reasoning="Hm."), "third"])
    async with Engine(model) as engine:
        first = await engine.generate(HI)
        second = await engine.generate([*HI, first.message, {"role": "user", "content": "And?"}])
        assert (first.text, first.finish_reason) == ("Hello ☃", "stop")
        assert (second.text, second.reasoning) == ("So.", "Hm.")
        assert (await engine.generate("plain")).text == "third"
        with pytest.raises(RequestFailed, match="no answer left"):
            await engine.generate(HI)
    assert model.prompts[1] == [
        {"role": "user", "content": "hi"},
        {"role": "assistant", "content": "Hello ☃"},
        {"role": "user", "content": "And?"},
    ]
    assert model.prompts[2] == [{"role": "user", "content": "plain"}]


@pytest.mark.parametrize("choice", ["auto", "required", "add"])
async def test_an_agent_calls_its_tools(choice: str) -> None:
    def answer(messages: list[dict[str, str]]) -> Said | str:
        last = messages[-1]
        if last["role"] == "tool":
            return f"It is {last['content']}."
        return Said(tool_calls=[("add", {"a": 1, "b": 2}), ("add", {"a": 3, "b": 4})])

    async with Engine(ScriptedModel(answer)) as engine:
        chat: list[Any] = [{"role": "user", "content": "1 + 2?"}]
        done = await engine.generate(chat, tools=[ADD], tool_choice=choice)
        assert [call.parsed for call in done.tool_calls] == [{"a": 1, "b": 2}, {"a": 3, "b": 4}]
        chat.append(done.message)
        for call in done.tool_calls:
            total = str(call.parsed["a"] + call.parsed["b"])
            chat.append({"role": "tool", "tool_call_id": call.id, "content": total})
        assert (await engine.generate(chat, tools=[ADD])).text == "It is 7."


async def test_what_does_not_fit_fails() -> None:
    model = ScriptedModel(["no call", Said(tool_calls=[("add", {"a": "x"})]), '{"a": 1}', "[1]"])
    async with Engine(model) as engine:
        for choice in ("required", "auto"):
            with pytest.raises(RequestFailed, match="does not fit"):
                await engine.generate(HI, tools=[ADD], tool_choice=choice)
        done = await engine.generate(HI, json_object=True)
        assert done.parsed == {"a": 1}
        with pytest.raises(RequestFailed, match="does not fit"):
            await engine.generate(HI, json_object=True)


async def test_errors_and_delays() -> None:
    script = [Said("begun", error=ValueError("broken")), Said("late", delay=0.05)]
    async with Engine(ScriptedModel(script)) as engine:
        text = ""
        with pytest.raises(RequestFailed, match="broken"):
            async for chunk in engine.stream(HI):
                text += chunk.text
        assert text == "begun"
        done = await engine.generate(HI)
        assert done.timings.ttft >= 0.05


async def test_answers_keep_their_requests_under_preemption() -> None:
    def answer(messages: list[dict[str, str]]) -> str:
        return messages[-1]["content"] * 40

    async with Engine(ScriptedModel(answer, blocks=12), block_size=16) as engine:
        found: dict[str, str] = {}

        async def ask(text: str) -> None:
            found[text] = (await engine.generate([{"role": "user", "content": text}])).text

        async with anyio.create_task_group() as group:
            for text in ("a", "b", "c", "d"):
                group.start_soon(ask, text)
        assert found == {text: text * 40 for text in "abcd"}


async def test_without_an_event_loop() -> None:
    with SyncEngine(ScriptedModel(["Hello."])) as engine:
        assert engine.generate(HI).text == "Hello."
