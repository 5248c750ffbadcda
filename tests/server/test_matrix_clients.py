"""What the official clients ask for beside plain chats: over a socket and in process, whole and
streamed, with equal results.

The gate runs them with the oldest clients as well, which use httpx in place of httpx2. The command
in `constraints-frameworks.txt` runs them with others that exclude those of `constraints.txt`.
"""

from __future__ import annotations

import json
import math
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import anthropic
import anyio
import openai
import pytest
from server.chat_model import CHAT, ChatModel, listening

from asyncinfer import Engine, Overloaded, anthropic_client, openai_client
from asyncinfer.server import create_app
from asyncinfer.testing import Said, ScriptedModel

pytestmark = pytest.mark.anyio

SCHEMA = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
FUNCTION = {"name": "weather", "description": "The weather.", "parameters": SCHEMA}
CALLED = Said(
    text="Let me look.",
    reasoning="They ask for two cities.",
    tool_calls=[("weather", {"city": "Oslo"}), ("weather", {"city": 'Ro"me\n'})],
)
WANTED = [("weather", {"city": "Oslo"}), ("weather", {"city": 'Ro"me\n'})]
#: Ways to ask for the same: one call, several, none.
CHOICES: dict[str, dict[str, Any]] = {
    "auto": {"tool_choice": "auto"},
    "required": {"tool_choice": "required"},
    "by name": {"tool_choice": {"type": "function", "function": {"name": "weather"}}},
    "none": {"tool_choice": "none"},
}


@asynccontextmanager
async def openai_clients(engine: Engine) -> AsyncIterator[dict[str, openai.AsyncOpenAI]]:
    async with (
        listening(create_app(engine)) as url,
        openai.AsyncOpenAI(base_url=f"{url}/v1", api_key="any", max_retries=0) as outside,
        openai_client(engine, max_retries=0) as inside,
    ):
        yield {"socket": outside, "in process": inside}


@asynccontextmanager
async def anthropic_clients(engine: Engine) -> AsyncIterator[dict[str, anthropic.AsyncAnthropic]]:
    async with (
        listening(create_app(engine)) as url,
        anthropic.AsyncAnthropic(base_url=url, api_key="any", max_retries=0) as outside,
        anthropic_client(engine, max_retries=0) as inside,
    ):
        yield {"socket": outside, "in process": inside}


def scripted(choice: str) -> Engine:
    """An engine that answers every request as one with this choice is to be answered."""
    said = CALLED
    if choice in ("required", "by name"):
        # What has to be a call has no text before it.
        said = Said(tool_calls=CALLED.tool_calls)
    if choice == "none":
        said = Said(text="No call.", reasoning="None is wanted.")
    return Engine(ScriptedModel(lambda _: said))


@pytest.mark.parametrize("choice", CHOICES)
async def test_calls_in_a_chat_are_equal(choice: str) -> None:
    options: dict[str, Any] = {
        "model": "scripted",
        "messages": CHAT,
        "tools": [{"type": "function", "function": {**FUNCTION, "strict": True}}],
        "max_completion_tokens": 400,
        **CHOICES[choice],
    }
    found = []
    async with scripted(choice) as engine, openai_clients(engine) as by_name:
        options["model"] = engine.model.name
        for client in by_name.values():
            (whole,) = (await client.chat.completions.create(**options)).choices
            calls = [
                (call.function.name, json.loads(call.function.arguments))
                for call in whole.message.tool_calls or []
            ]
            assert calls == ([] if choice == "none" else WANTED)
            async with client.chat.completions.stream(**options) as stream:
                final = await stream.get_final_completion()
            (built,) = final.choices
            told = [call.function.arguments for call in whole.message.tool_calls or []]
            assert [call.function.arguments for call in built.message.tool_calls or []] == told
            assert (built.finish_reason, built.message.content or None) == (
                whole.finish_reason,
                whole.message.content or None,
            )
            extra = [each.message.model_dump().get("reasoning") or "" for each in (whole, built)]
            assert extra[0] == extra[1]
            found.append((calls, whole.message.content, whole.finish_reason, extra[0]))
    assert found[0] == found[1]
    assert found[0][2] == ("stop" if choice == "none" else "tool_calls")
    assert bool(found[0][3]) == (choice in ("auto", "none"))


@pytest.mark.parametrize("choice", ["auto", "any", "tool", "none"])
async def test_calls_in_a_message_and_their_count_are_equal(choice: str) -> None:
    tool = {"name": "weather", "description": "The weather.", "input_schema": SCHEMA}
    options: dict[str, Any] = {
        "messages": CHAT[1:],
        "system": "Be brief.",
        "tools": [tool],
        "tool_choice": {"type": choice, **({"name": "weather"} if choice == "tool" else {})},
        "max_tokens": 400,
    }
    kind = {"any": "required", "tool": "by name"}.get(choice, choice)
    found = []
    async with scripted(kind) as engine, anthropic_clients(engine) as by_name:
        options["model"] = engine.model.name
        for client in by_name.values():
            done = await client.messages.create(**options)
            async with client.messages.stream(**options) as stream:
                built = await stream.get_final_message()
            told = [
                [
                    (each.type, getattr(each, "input", None), getattr(each, "text", None))
                    for each in message.content
                ]
                for message in (done, built)
            ]
            assert told[0] == told[1]
            assert done.stop_reason == built.stop_reason
            asked = {name: options[name] for name in ("model", "messages", "system", "tools")}
            count = (await client.messages.count_tokens(**asked)).input_tokens
            read = done.usage.cache_read_input_tokens or 0
            if choice != "none":
                assert count == done.usage.input_tokens + read
            found.append((told[0], done.stop_reason, count))
    assert found[0] == found[1]
    inputs = [each[1] for each in found[0][0] if each[0] == "tool_use"]
    assert inputs == ([] if choice == "none" else [arguments for _, arguments in WANTED])


async def test_calls_in_a_response_are_equal() -> None:
    options: dict[str, Any] = {
        "input": [{"role": "user", "content": "hello"}],
        "tools": [{"type": "function", "strict": True, **FUNCTION}],
        "max_output_tokens": 400,
    }
    found = []
    async with scripted("auto") as engine, openai_clients(engine) as by_name:
        options["model"] = engine.model.name
        for client in by_name.values():
            done = await client.responses.create(**options)
            async with client.responses.stream(**options) as stream:
                built = await stream.get_final_response()
            told = [
                [
                    (item.type, getattr(item, "arguments", None), getattr(item, "name", None))
                    for item in response.output
                ]
                for response in (done, built)
            ]
            assert told[0] == told[1]
            assert done.output_text == built.output_text
            found.append((told[0], done.output_text, done.status))
    assert found[0] == found[1]
    assert [json.loads(each[1]) for each in found[0][0] if each[0] == "function_call"] == [
        arguments for _, arguments in WANTED
    ]


@pytest.mark.parametrize("streamed", [False, True])
async def test_predictions_are_equal(streamed: bool) -> None:
    options: dict[str, Any] = {"model": "ChatModel", "messages": CHAT, "temperature": 0}
    options |= {"max_completion_tokens": 24, "extra_body": {"regex": "[a-h]{24}"}}
    found = []
    for name in ("socket", "in process"):
        # An engine each: one may find that drafts cost more than they spare, and make none.
        async with Engine(ChatModel()) as engine, openai_clients(engine) as by_name:
            create = by_name[name].chat.completions.create
            text = (await create(**options)).choices[0].message.content
            guessed = {**options, "prediction": {"type": "content", "content": text}}
            if streamed:
                told, usage = "", None
                asked = {"stream": True, "stream_options": {"include_usage": True}}
                async for chunk in await create(**guessed, **asked):
                    told += "".join(choice.delta.content or "" for choice in chunk.choices)
                    usage = chunk.usage
            else:
                done = await create(**guessed)
                told, usage = done.choices[0].message.content, done.usage
            assert told == text
            assert usage is not None
            details = usage.completion_tokens_details
            found.append((text, details.accepted_prediction_tokens, usage.completion_tokens))
    assert found[0] == found[1]
    assert found[0][1] > 20


async def test_the_other_paths_are_equal() -> None:
    """`/v1/models`, `/tokenize`, `/health`: by the client's own methods where it has one."""
    found = []
    async with Engine(ChatModel()) as engine, openai_clients(engine) as by_name:
        for client in by_name.values():
            # Each application says when it was made.
            (listed,) = (await client.models.list()).data
            told = listed.model_dump(exclude={"created"})
            one = await client.models.retrieve("ChatModel")
            assert one.model_dump(exclude={"created"}) == told
            ids = await client.post("/../tokenize", body={"messages": CHAT}, cast_to=object)
            text = await client.post(
                "/../detokenize", body={"tokens": ids["tokens"]}, cast_to=object
            )
            health = await client.get("/../health", cast_to=object)
            with pytest.raises(openai.NotFoundError):
                await client.models.retrieve("another")
            scored = await client.completions.create(
                model="ChatModel", prompt="hello", echo=True, logprobs=1, max_tokens=0
            )
            kept = scored.choices[0].logprobs
            assert kept is not None
            assert all(math.isfinite(each) for each in (kept.token_logprobs or [])[1:])
            found.append((told, ids, text, health, kept.token_logprobs))
    assert found[0] == found[1]


async def test_errors_in_the_middle_of_a_stream_are_equal() -> None:
    """After a text that was read, each client raises its own error, which has the message."""

    def script(messages: Any) -> Said:
        return Said(text="half of it", error=LookupError("a secret"))

    async with Engine(ScriptedModel(script)) as engine:
        name = engine.model.name
        async with openai_clients(engine) as by_name:
            for client in by_name.values():
                text = ""
                with pytest.raises(openai.APIError, match="the request failed") as failed:
                    async for chunk in await client.chat.completions.create(
                        model=name,
                        messages=CHAT,  # type: ignore[arg-type]
                        stream=True,
                    ):
                        text += chunk.choices[0].delta.content or ""
                assert text == "half of it"
                assert "secret" not in str(failed.value)
                with pytest.raises(openai.APIError, match="the request failed"):
                    async for _ in await client.completions.create(
                        model=name, prompt="a", stream=True
                    ):
                        pass
                with pytest.raises(openai.APIError, match="the request failed"):
                    async for _ in await client.responses.create(
                        model=name, input="a", stream=True
                    ):
                        pass
        async with anthropic_clients(engine) as by_kind:
            for other in by_kind.values():
                text = ""
                with pytest.raises(anthropic.APIError, match="the request failed"):
                    async with other.messages.stream(
                        model=name,
                        max_tokens=99,
                        messages=CHAT[1:],  # type: ignore[arg-type]
                    ) as stream:
                        async for part in stream.text_stream:
                            text += part
                assert text == "half of it"


@pytest.mark.parametrize("where", ["socket", "in process"])
async def test_retries_are_equal(where: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """After the milliseconds of a 429, and never after a deadline."""
    pauses: list[float] = []
    real = anyio.sleep

    async def sleep(seconds: float) -> None:
        pauses.append(seconds)
        await real(0)

    monkeypatch.setattr(anyio, "sleep", sleep)
    refusals, asked = 0, 0
    async with Engine(ChatModel()) as engine:
        inner = engine.generate

        async def generate(*given: Any, **options: Any) -> Any:
            nonlocal refusals, asked
            asked += 1
            if refusals:
                refusals -= 1
                raise Overloaded("busy")
            return await inner(*given, **options)

        monkeypatch.setattr(engine, "generate", generate)
        chat: dict[str, Any] = {"model": "ChatModel", "messages": CHAT, "max_tokens": 4}
        message = {**chat, "messages": CHAT[1:]}
        async with openai_clients(engine) as first, anthropic_clients(engine) as second:
            ways: list[tuple[Any, dict[str, Any], Any]] = [
                (first[where].with_options(max_retries=2).chat.completions, chat, openai),
                (second[where].with_options(max_retries=2).messages, message, anthropic),
            ]
            for path, body, kind in ways:
                refusals = 2
                pauses.clear()
                await path.create(**body)
                # `retry-after-ms: 500` as it is: without it a client waits for another time.
                assert [each for each in pauses if each >= 0.1] == [0.5, 0.5]
                asked = 0
                late = {"deadline": 0.001, "ignore_eos": True}
                with pytest.raises(kind.InternalServerError, match="deadline"):
                    await path.create(**{**body, "max_tokens": 3000}, extra_body=late)
                assert asked == 1
