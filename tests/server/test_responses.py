"""OpenAI's Responses: by its own client, over a socket and in process, with equal results."""

from __future__ import annotations

import json
from typing import Any

import openai
import pytest
from server.chat_model import ChatModel, ask, listening

from asyncinfer import Engine, openai_client
from asyncinfer.server import create_app

pytestmark = pytest.mark.anyio

PATH = "/v1/responses"
SCHEMA = {"enum": ["yes", "no"]}
HALF = "\ud800"
#: One message.
SAID = [{"role": "assistant", "content": "x"}, {"role": "assistant", "content": "y"}]
ASKED = {"role": "user", "content": "z"}
CALL = {"type": "function_call", "name": "f", "call_id": "c", "arguments": "{}"}
OUTPUT = {"type": "function_call_output", "call_id": "c", "output": "x"}
THOUGHT = {"type": "reasoning", "summary": [{"type": "summary_text", "text": HALF}]}
CASES: dict[str, dict[str, Any]] = {
    "text": {"input": "hello"},
    "items": {
        "input": [
            {"role": "user", "content": "hello"},
            {
                "type": "message",
                "role": "assistant",
                "content": [{"type": "output_text", "text": "Hi", "annotations": []}],
            },
            {"role": "user", "content": [{"type": "input_text", "text": "go on"}]},
        ]
    },
    "json": {
        "input": "hello",
        "text": {"format": {"type": "json_schema", "name": "a", "schema": SCHEMA}},
    },
    "logprobs": {
        "input": "hello",
        "include": ["message.output_text.logprobs"],
        "top_logprobs": 2,
    },
}


@pytest.mark.parametrize("case", CASES)
async def test_a_response_is_equal_however_it_is_asked(case: str) -> None:
    options: dict[str, Any] = {
        "model": "ChatModel",
        "instructions": "Be brief.",
        "max_output_tokens": 12,
        "extra_body": {"seed": 7},
        **CASES[case],
    }
    found = []
    async with Engine(ChatModel()) as engine, listening(create_app(engine)) as url:
        async with (
            openai.AsyncOpenAI(base_url=f"{url}/v1", api_key="any") as outside,
            openai_client(engine) as inside,
        ):
            for client in (outside, inside):
                done = await client.responses.create(**options)
                text, numbers, final = "", [], None
                async for event in await client.responses.create(stream=True, **options):
                    numbers.append(event.sequence_number)
                    if event.type == "response.output_text.delta":
                        text += event.delta
                    if event.type in ("response.completed", "response.incomplete"):
                        final = event.response
                assert numbers == list(range(len(numbers)))
                assert final is not None
                assert text == done.output_text == final.output_text != ""
                assert (done.status, done.output[0].type) == (final.status, "message")
                assert done.usage is not None
                assert final.usage is not None
                assert done.usage.output_tokens == final.usage.output_tokens
                # The client's own way to put the events together.
                async with client.responses.stream(**options) as stream:
                    built = (
                        await stream.get_final_response() if done.status == "completed" else done
                    )
                assert built.output_text == text
                found.append((text, done.status, done.output[0].content[0].logprobs))
    assert found[0] == found[1]
    if case == "json":
        assert json.loads(found[0][0]) in ("yes", "no")
        assert found[0][1] == "completed"
    elif case == "logprobs":
        assert len(found[0][2]) == 12
        assert found[0][1] == "incomplete"


async def test_items_of_an_answer_are_one_message() -> None:
    template = (
        "{{ tools or '' }}{% for m in messages %}"
        "<{{ m.role }}>{{ m.reasoning_content }}|{{ m.content }}|"
        "{{ m.tool_calls[0].function.arguments.x if m.tool_calls }}{% endfor %}"
    )
    items = [
        {"role": "developer", "content": "rules"},
        {"role": "user", "content": "add"},
        {"type": "reasoning", "id": "r", "summary": [{"type": "summary_text", "text": "hm"}]},
        {"role": "assistant", "content": "so"},
        {"type": "reasoning", "content": [{"type": "reasoning_text", "text": "m"}]},
        {"type": "function_call", "call_id": "a", "name": "add", "arguments": '{"x": 1}'},
        {"type": "function_call_output", "call_id": "a", "output": "2"},
    ]
    async with Engine(ChatModel(template=template)) as engine:
        answer = await ask(create_app(engine), PATH, {"input": items, "max_output_tokens": 2})
        prompt = "<system>|rules|<user>|add|<assistant>hmm|so|1<tool>|2|"
        assert answer.json["usage"]["input_tokens"] == len(prompt)


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({}, "input"),
        ({"input": []}, "input"),
        ({"input": "a", "previous_response_id": "resp_1"}, "previous_response_id"),
        ({"input": "a", "background": True}, "background"),
        ({"input": [{"type": "web_search_call"}]}, "input[0].type"),
        ({"input": [{"type": "reasoning", "content": 5}]}, "input[0].content"),
        ({"input": [{"type": "reasoning", "summary": "hm"}]}, "input[0].summary"),
        ({"input": [{"role": "user", "content": [{"type": "input_image"}]}]}, None),
        ({"input": "a", "instructions": HALF}, "instructions"),
        ({"input": HALF, "instructions": "b"}, "input"),
        ({"input": [*SAID, {"role": "user", "content": HALF}]}, "input[2].content"),
        ({"input": [*SAID, {"role": "assistant", "content": HALF}]}, "input[2].content"),
        ({"input": [*SAID, THOUGHT]}, "input[2].summary"),
        ({"input": [*SAID, {**CALL, "name": 5}]}, "input[2].name"),
        ({"input": [*SAID, {**CALL, "name": HALF}]}, "input[2].name"),
        ({"input": [*SAID, {**CALL, "call_id": HALF}]}, "input[2].call_id"),
        ({"input": [*SAID, {**CALL, "arguments": HALF}]}, "input[2].arguments"),
        ({"input": [*SAID, {**CALL, "arguments": '{"a": "\\ud800"}'}]}, "input[2].arguments.a"),
        ({"input": [*SAID, CALL, {**OUTPUT, "output": 5}]}, "input[3].output"),
        ({"input": [*SAID, CALL, {**OUTPUT, "output": HALF}]}, "input[3].output"),
        ({"input": [*SAID, CALL, {**OUTPUT, "call_id": HALF}]}, "input[3].call_id"),
        ({"input": "a", "max_output_tokens": -1}, "max_output_tokens"),
        ({"input": "a", "text": {"format": {"type": "xml"}}}, "text.format"),
        # The answer would be any text.
        ({"input": "a", "text": {"type": "json_schema", "schema": {}}}, "text.type"),
        ({"input": "a", "text": {"verbosity": "low", "other": None, "fromat": {}}}, "text.fromat"),
    ],
)
async def test_what_is_not_served_is_named(body: Any, param: str | None) -> None:
    async with Engine(ChatModel()) as engine:
        answer = await ask(create_app(engine), PATH, body)
        assert answer.status == 400
        told = "input[0].content[0].type" if param is None else param
        assert answer.json["error"]["param"] == told
