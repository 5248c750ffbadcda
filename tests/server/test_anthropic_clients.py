"""Anthropic's own clients: over a socket and in process, with equal results."""

from __future__ import annotations

from typing import Any

import anthropic
import anyio.to_thread
import pytest
from server.chat_model import ChatModel, ask, listening

from asyncinfer import Engine, SyncEngine, anthropic_client, sync_anthropic_client
from asyncinfer.server import ApiKey, create_app
from asyncinfer.testing import Said, ScriptedModel

pytestmark = pytest.mark.anyio

MESSAGES: Any = [
    {"role": "user", "content": "hello"},
    {"role": "assistant", "content": [{"type": "text", "text": "Hi"}]},
    {"role": "user", "content": [{"type": "text", "text": "go "}, {"type": "text", "text": "on"}]},
]
HALF = "\ud800"
RESULTS: Any = {
    "system": "Be brief.",
    "messages": [
        {
            "role": "user",
            "content": [
                {"type": "tool_result", "tool_use_id": str(index), "content": text}
                for index, text in enumerate(("fine", HALF))
            ],
        }
    ],
}
PROMPT = "<system>Be brief.<user>hello<assistant>Hi<user>go on<assistant>"
CASES: dict[str, dict[str, Any]] = {
    "plain": {},
    "stopped": {"stop_sequences": ["e", "f"], "max_tokens": 400},
    "long stop": {"stop_sequences": ["zq", "q"], "max_tokens": 400},
    "ours": {"extra_body": {"top_k": 3, "choice": ["yes", "no"]}},
    "json": {
        "output_config": {
            "format": {"type": "json_schema", "schema": {"enum": ["yes", "no"]}},
        }
    },
}


@pytest.mark.parametrize("case", CASES)
async def test_a_message_is_equal_however_it_is_asked(case: str) -> None:
    options: dict[str, Any] = {"max_tokens": 12, **CASES[case]}
    options["extra_body"] = {"seed": 7, **options.get("extra_body", {})}
    options |= {"model": "ChatModel", "messages": MESSAGES, "system": "Be brief."}
    found = []
    async with Engine(ChatModel()) as engine:
        async with (
            listening(create_app(engine)) as url,
            anthropic.AsyncAnthropic(base_url=url, api_key="any") as outside,
            anthropic_client(engine) as inside,
        ):
            for client in (outside, inside):
                done = await client.messages.create(**options)
                async with client.messages.stream(**options) as stream:
                    text = "".join([each async for each in stream.text_stream])
                    built = await stream.get_final_message()
                (block,) = done.content or [None]
                assert block is not None
                assert block.type == "text"
                assert (
                    text
                    == block.text
                    == "".join(each.text for each in built.content if each.type == "text")
                )
                told = (done.stop_reason, done.stop_sequence)
                assert told == (built.stop_reason, built.stop_sequence)
                for usage in (done.usage, built.usage):
                    read = usage.cache_read_input_tokens or 0
                    assert usage.input_tokens + read == len(PROMPT)
                assert done.usage.output_tokens == built.usage.output_tokens
                found.append((block.text, *told))
    assert found[0] == found[1]
    text, reason, stop = found[0]
    if case == "stopped":
        assert reason == "stop_sequence"
        assert stop in ("e", "f")
        assert "e" not in text
        assert "f" not in text
    if case == "ours":
        assert text in ("yes", "no")


async def test_tokens_are_counted_as_they_are_taken() -> None:
    async with Engine(ChatModel()) as engine, anthropic_client(engine) as client:
        count = await client.messages.count_tokens(
            model="ChatModel", messages=MESSAGES, system="Be brief."
        )
        assert count.input_tokens == len(PROMPT)
        # The last message is the beginning of the answer, as it is where the answer is asked for.
        asked: Any = {"model": "ChatModel", "messages": MESSAGES[:2]}
        count = await client.messages.count_tokens(**asked)
        done = await client.messages.create(**asked, max_tokens=1)
        assert count.input_tokens == done.usage.input_tokens == len("<user>hello<assistant>Hi")
        asked["extra_body"] = {"continue_final_message": False}
        count = await client.messages.count_tokens(**asked)
        done = await client.messages.create(**asked, max_tokens=1)
        read = done.usage.cache_read_input_tokens or 0
        assert count.input_tokens == done.usage.input_tokens + read


async def test_a_header_that_changes_does_not_defeat_the_cache() -> None:
    """As Claude Code sends one."""
    async with Engine(ChatModel()) as engine, anthropic_client(engine) as client:
        for number in range(2):
            done = await client.messages.create(
                model="ChatModel",
                max_tokens=2,
                messages=MESSAGES,
                system=[
                    {"type": "text", "text": f"x-anthropic-billing-header: cch={number};"},
                    {
                        "type": "text",
                        "text": "Be brief.",
                        "cache_control": {"type": "ephemeral"},
                    },
                ],
            )
        assert done.usage.cache_read_input_tokens == len(PROMPT) // 16 * 16


async def test_calls_and_results_are_messages() -> None:
    template = (
        "{{ tools or '' }}{% for m in messages %}"
        "<{{ m.role }}>{{ m.content }}{{ m.tool_calls }}{% endfor %}"
    )
    messages = [
        {"role": "user", "content": "add"},
        {
            "role": "assistant",
            "content": [
                {"type": "thinking", "thinking": "hm", "signature": ""},
                {"type": "tool_use", "id": "a", "name": "add", "input": {"x": 1}},
            ],
        },
        {
            "role": "user",
            "content": [
                {"type": "tool_result", "tool_use_id": "a", "content": "2"},
                {"type": "text", "text": "thanks"},
            ],
        },
    ]
    async with Engine(ChatModel(template=template)) as engine:
        app = create_app(engine)
        answer = await ask(app, "/v1/messages/count_tokens", {"messages": messages})
        call = {"id": "a", "type": "function", "function": {"name": "add", "arguments": {"x": 1}}}
        told = f"<user>add<assistant>{[call]}<tool>2<user>thanks"
        assert answer.json == {"input_tokens": len(told)}


@pytest.mark.parametrize(
    ("body", "told"),
    [
        ({}, "messages=None: is missing"),
        (
            {"messages": MESSAGES, "max_tokens": 1, "response_format": {}},
            "response_format={}: is no",
        ),
        (
            {
                "messages": MESSAGES,
                "max_tokens": 1,
                "tool_choice": {"type": "auto", "disable_parallel_tool_use": "false"},
            },
            "tool_choice.disable_parallel_tool_use='false': must be true or false",
        ),
        ({"messages": MESSAGES}, "max_tokens=None"),
        ({"messages": MESSAGES, "max_tokens": -1}, "max_tokens=-1"),
        ({"messages": MESSAGES, "max_tokens": 9, "stop_sequences": [1]}, "stop_sequences"),
        ({"messages": MESSAGES, "max_tokens": 9, "stop_sequences": " "}, "must be a list"),
        (
            {"messages": MESSAGES, "max_tokens": 9, "stop_sequences": ["a", ""]},
            "stop_sequences[1]=",
        ),
        (
            {"messages": MESSAGES, "max_tokens": 9, "stop_sequences": ["\n\n"]},
            "stop_sequences[0]='\\n\\n': must contain more than white space",
        ),
        ({"messages": [{"role": "tool", "content": ""}], "max_tokens": 9}, "messages[0].role"),
        ({"messages": MESSAGES, "system": HALF, "max_tokens": 9}, f"system={HALF!r}"),
        ({**RESULTS, "max_tokens": 9}, "messages[0].content[1].content="),
        (
            {"messages": [{"role": "user", "content": [{"type": "image"}]}], "max_tokens": 9},
            "messages[0].content[0].type='image': must be 'text': images",
        ),
        (
            {"messages": [{"role": "user", "content": "x" * 40_000}], "max_tokens": 9},
            "prompt is too long: messages=<40",
        ),
    ],
)
async def test_errors_are_those_of_anthropic(body: Any, told: str) -> None:
    async with Engine(ChatModel()) as engine:
        answer = await ask(create_app(engine), "/v1/messages", body)
        assert answer.status == 400
        assert answer.json["type"] == "error"
        assert answer.json["error"]["type"] == "invalid_request_error"
        assert told in answer.json["error"]["message"]
        assert answer.json["request_id"] == answer.headers["request-id"]


async def test_the_client_knows_its_errors() -> None:
    async with Engine(ChatModel()) as engine:
        app = create_app(engine, keys={"right": ApiKey()})
        async with listening(app) as url:
            async with anthropic.AsyncAnthropic(base_url=url, api_key="wrong") as client:
                with pytest.raises(anthropic.AuthenticationError):
                    await client.messages.create(model="a", max_tokens=1, messages=MESSAGES)
            async with anthropic.AsyncAnthropic(base_url=url, api_key="right") as client:
                with pytest.raises(anthropic.NotFoundError):
                    await client.messages.create(model="a", max_tokens=1, messages=MESSAGES)


async def test_the_tool_runner_of_the_client() -> None:
    """It asks for a conversation that the server keeps, and goes on without one where that is
    refused in its own words."""

    @anthropic.beta_async_tool
    async def weather(city: str) -> str:
        """The weather of a city."""
        return f"hot in {city}"

    script = [Said("I look.", tool_calls=[("weather", {"city": "Rome"})]), Said("It is hot.")]
    async with Engine(ScriptedModel(script)) as engine, anthropic_client(engine) as client:
        runner = client.beta.messages.tool_runner(
            model="ScriptedModel",
            max_tokens=200,
            messages=[{"role": "user", "content": "How is Rome?"}],
            tools=[weather],
        )
        assert [message.stop_reason async for message in runner] == ["tool_use", "end_turn"]
        body = {"messages": MESSAGES, "max_tokens": 1, "thread": {"type": "create"}}
        answer = await ask(create_app(engine), "/v1/messages", body)
    assert answer.status == 400
    assert answer.json["error"]["details"]["error_code"] == "thread_unsupported_request"


async def test_the_client_of_programs_without_a_loop() -> None:
    def work() -> None:
        with SyncEngine(ChatModel()) as engine, sync_anthropic_client(engine) as client:
            options: Any = {"model": "ChatModel", "max_tokens": 8, "messages": MESSAGES}
            options["extra_body"] = {"seed": 3}
            done = client.messages.create(**options)
            with client.messages.stream(**options) as stream:
                text = "".join(stream.text_stream)
            assert done.content[0].type == "text"
            assert done.content[0].text == text != ""

    await anyio.to_thread.run_sync(work)
