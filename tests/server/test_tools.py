"""Tools and reasoning by each protocol, whole and as events, read by the official clients."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import pytest
from server.chat_model import CHAT, ChatModel, ask

from asyncinfer import Engine, EngineConfig, anthropic_client, openai_client
from asyncinfer.chunk import Chunk
from asyncinfer.engine import Loaded
from asyncinfer.server import create_app
from asyncinfer.server.call import json_bytes
from asyncinfer.server.chat_forms import delta_bytes, delta_of
from asyncinfer.testing import Said, ScriptedModel
from asyncinfer.text import ChatTemplate

pytestmark = pytest.mark.anyio

SCHEMA = {
    "type": "object",
    "properties": {"city": {"enum": ["Rome", "Oslo"]}, "days": {"enum": [1, 2]}},
    "required": ["city", "days"],
    "additionalProperties": False,
}
CALLED = {"max_tokens": 9, "tools": [{"name": "weather", "input_schema": {"type": "object"}}]}
FUNCTION = {"name": "weather", "description": "The weather.", "parameters": SCHEMA}
ARGUMENTS = [{"city": city, "days": days} for city in ("Rome", "Oslo") for days in (1, 2)]
#: Its prompt opens the reasoning, which the answer closes.
THINKING = (
    "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}"
    "{% if add_generation_prompt %}<assistant><think>\n{% endif %}{# </think> #}"
)


class XmlModel(ScriptedModel):
    """Whose template knows calls as Qwen3-Coder writes them."""

    def load(self, config: EngineConfig, progress: Any = None) -> Loaded:
        loaded = super().load(config, progress)
        source = "{{ messages[0].content }}{{ tools }}{# <function=<parameter= #}"
        return replace(loaded, template=ChatTemplate(source, shield=loaded.tokenizer.shield))


@pytest.mark.parametrize("text", ["plain", '"\\ \n\x00\x7f', "é \u2028 漢 \U0001f600", ""])
def test_a_delta_of_text_is_the_json_of_its_object(text: str) -> None:
    delta = delta_of(Chunk(text))
    assert delta_bytes(Chunk(text)) == (json_bytes(delta) if delta else b"")


async def test_calls_in_a_chat() -> None:
    options: dict[str, Any] = {
        "model": "ChatModel",
        "messages": CHAT,
        # openai 2.x reads the calls of strict tools alone.
        "tools": [{"type": "function", "function": {**FUNCTION, "strict": True}}],
        "tool_choice": "required",
        "parallel_tool_calls": False,
        "max_completion_tokens": 200,
        "seed": 3,
    }
    async with Engine(ChatModel()) as engine, openai_client(engine) as client:
        done = await client.chat.completions.create(**options)
        (choice,) = done.choices
        assert choice.finish_reason == "tool_calls"
        assert choice.message.content is None
        (call,) = choice.message.tool_calls or []
        assert call.type == "function"
        assert call.function.name == "weather"
        assert json.loads(call.function.arguments) in ARGUMENTS
        deltas = []
        async for chunk in await client.chat.completions.create(stream=True, **options):
            for each in chunk.choices:
                deltas += each.delta.tool_calls or []
                reason = each.finish_reason
        assert reason == "tool_calls"
        assert {delta.index for delta in deltas} == {0}
        # Clients put the deltas of each text together.
        assert [delta.function.name for delta in deltas if delta.function.name] == ["weather"]
        assert len([delta for delta in deltas if delta.id]) == 1
        text = "".join(delta.function.arguments for delta in deltas)
        assert text == call.function.arguments
        # The client's own way, and the answer goes back as it came.
        async with client.chat.completions.stream(**options) as stream:
            final = await stream.get_final_completion()
        assert final.choices[0].message.tool_calls[0].function.arguments == text
        result = {"role": "tool", "tool_call_id": call.id, "content": "warm"}
        options["messages"] = [*CHAT, choice.message.model_dump(), result]
        options["tool_choice"] = {"type": "function", "function": {"name": "weather"}}
        again = await client.chat.completions.create(**options)
        assert again.choices[0].message.tool_calls


async def test_calls_in_a_message() -> None:
    tool = {"name": "weather", "description": "The weather.", "input_schema": SCHEMA}
    options: dict[str, Any] = {
        "model": "ChatModel",
        "messages": [{"role": "user", "content": "hello"}],
        "tools": [tool],
        "tool_choice": {"type": "any", "disable_parallel_tool_use": True},
        "max_tokens": 200,
        "extra_body": {"seed": 3},
    }
    async with Engine(ChatModel()) as engine, anthropic_client(engine) as client:
        done = await client.messages.create(**options)
        (block,) = done.content
        assert block.type == "tool_use"
        assert done.stop_reason == "tool_use"
        assert block.input in ARGUMENTS
        async with client.messages.stream(**options) as stream:
            final = await stream.get_final_message()
        assert final.stop_reason == "tool_use"
        (built,) = final.content
        assert built.type == "tool_use"
        assert (built.name, built.input) == (block.name, block.input)
        counted = {name: options[name] for name in ("model", "messages", "tools")}
        count = await client.messages.count_tokens(**counted)
        assert count.input_tokens == done.usage.input_tokens + done.usage.cache_read_input_tokens
        result = {"type": "tool_result", "tool_use_id": block.id, "content": "warm"}
        options["messages"] += [
            {"role": "assistant", "content": [block.model_dump()]},
            {"role": "user", "content": [result]},
        ]
        options["tool_choice"] = {"type": "tool", "name": "weather"}
        assert (await client.messages.create(**options)).stop_reason == "tool_use"


async def test_calls_in_a_response() -> None:
    options: dict[str, Any] = {
        "model": "ChatModel",
        "input": [{"role": "user", "content": "hello"}],
        "tools": [{"type": "function", "strict": True, **FUNCTION}],
        "tool_choice": "required",
        "parallel_tool_calls": False,
        "max_output_tokens": 200,
        "extra_body": {"seed": 3},
    }
    async with Engine(ChatModel()) as engine, openai_client(engine) as client:
        done = await client.responses.create(**options)
        (item,) = done.output
        assert item.type == "function_call"
        assert json.loads(item.arguments) in ARGUMENTS
        async with client.responses.stream(**options) as stream:
            names = [event.type async for event in stream]
            final = await stream.get_final_response()
        (built,) = final.output
        assert built.type == "function_call"
        assert (built.name, built.arguments) == ("weather", item.arguments)
        assert names[:3] == [
            "response.created",
            "response.in_progress",
            "response.output_item.added",
        ]
        assert names[-3:] == [
            "response.function_call_arguments.done",
            "response.output_item.done",
            "response.completed",
        ]
        output = {"type": "function_call_output", "call_id": item.call_id, "output": "warm"}
        options["input"] += [item.model_dump(), output]
        options["tool_choice"] = {"type": "function", "name": "weather"}
        assert (await client.responses.create(**options)).output[0].type == "function_call"


async def test_reasoning_is_told_apart() -> None:
    """The prompt opens it, and its budget closes it."""
    ours = {"thinking_budget": 5, "seed": 1}
    async with Engine(ChatModel(template=THINKING)) as engine:
        app = create_app(engine)
        chat = {"messages": CHAT, "max_tokens": 24, **ours}
        whole = (await ask(app, "/v1/chat/completions", chat)).json
        message = whole["choices"][0]["message"]
        thought = whole["usage"]["completion_tokens_details"]["reasoning_tokens"]
        assert thought == ours["thinking_budget"]
        assert message["reasoning"] == message["reasoning_content"] != ""
        assert message["content"]
        assert "think>" not in message["content"] + message["reasoning"]
        streamed = {**chat, "stream": True, "stream_options": {"include_usage": True}}
        *events, last, _ = (await ask(app, "/v1/chat/completions", streamed)).events
        assert last["usage"]["completion_tokens_details"]["reasoning_tokens"] == thought
        deltas = [each["choices"][0]["delta"] for each in events if each]
        assert "".join(each.get("reasoning", "") for each in deltas) == message["reasoning"]
        assert "".join(each.get("content", "") for each in deltas) == message["content"]

        body = {**chat, "messages": CHAT[1:], "system": "Be brief."}
        told = (await ask(app, "/v1/messages", body)).json["content"]
        assert [each["type"] for each in told] == ["thinking", "text"]
        assert told[0]["thinking"] == message["reasoning"]
        events = (await ask(app, "/v1/messages", {**body, "stream": True})).events
        begun = [each["content_block"]["type"] for each in events if "content_block" in each]
        assert begun == ["thinking", "text"]

        body = {"input": CHAT, "max_output_tokens": 24, **ours}
        whole = (await ask(app, "/v1/responses", body)).json
        told = whole["output"]
        assert [each["type"] for each in told] == ["reasoning", "message"]
        assert whole["usage"]["output_tokens_details"] == {"reasoning_tokens": thought}
        events = (await ask(app, "/v1/responses", {**body, "stream": True})).events
        usage = events[-1]["response"]["usage"]
        assert usage["output_tokens_details"] == {"reasoning_tokens": thought}
        assert events[-1]["response"]["output"] == [
            {**each, "id": other["id"]}
            for each, other in zip(told, events[-1]["response"]["output"], strict=True)
        ]


@pytest.mark.parametrize(
    ("path", "fields", "param"),
    [
        ("/v1/chat/completions", {"tools": [{"type": "retrieval"}]}, "tools[0].type"),
        ("/v1/chat/completions", {"tool_choice": "required"}, "tool_choice"),
        ("/v1/chat/completions", {"tools": [FUNCTION], "tool_choice": "x"}, "tool_choice"),
        ("/v1/chat/completions", {"template_options": {"x": 1}}, "x"),
        ("/v1/chat/completions", {"template_options": 5}, "template_options"),
        ("/v1/chat/completions", {"chat_template_kwargs": 5}, "chat_template_kwargs"),
        (
            "/v1/chat/completions",
            {"template_options": {}, "chat_template_kwargs": {}},
            "chat_template_kwargs",
        ),
        ("/v1/chat/completions", {"max_tokens": -1}, "max_tokens"),
        ("/v1/chat/completions", {"max_completion_tokens": -1}, "max_completion_tokens"),
        (
            "/v1/chat/completions",
            {"max_tokens": 5, "max_completion_tokens": -1},
            "max_completion_tokens",
        ),
        ("/v1/messages", {"max_tokens": 9, "tools": [{"type": "web_search"}]}, "tools[0].type"),
        ("/v1/messages", {"max_tokens": 9, "tool_choice": {"type": "x"}}, "tool_choice"),
        ("/v1/messages", {**CALLED, "tool_choice": {"type": "tool"}}, "tool_choice"),
        ("/v1/messages", {**CALLED, "tool_choice": {"type": "tool", "name": None}}, "tool_choice"),
    ],
)
async def test_bad_options_are_named(path: str, fields: Any, param: str) -> None:
    async with Engine(ChatModel()) as engine:
        body = {"messages": CHAT[1:], **fields}
        answer = await ask(create_app(engine), path, body)
        assert answer.status == 400
        assert answer.json["error"]["message"].startswith(f"{param}=")


async def test_a_choice_of_another_kind_is_told_as_it_came() -> None:
    choice = {"type": "allowed_tools", "mode": "auto", "tools": [{"type": "function"}]}
    tools = [{"type": "function", "function": FUNCTION}]
    async with Engine(ChatModel()) as engine:
        body = {"messages": CHAT, "tools": tools, "tool_choice": choice}
        answer = await ask(create_app(engine), "/v1/chat/completions", body)
    assert answer.status == 400
    assert "'type': 'allowed_tools'" in answer.json["error"]["message"]
    assert "must have the name of a tool" in answer.json["error"]["message"]


async def test_each_of_several_calls_is_a_block_of_a_message() -> None:
    calls: list[tuple[str, dict[str, Any]]] = [("weather", given) for given in ARGUMENTS[:3]]
    options: dict[str, Any] = {"model": "ScriptedModel", "messages": CHAT[1:], **CALLED}
    options["max_tokens"] = 400
    model = ScriptedModel([Said("I look.", tool_calls=calls)] * 2)
    async with Engine(model) as engine, anthropic_client(engine) as client:
        done = await client.messages.create(**options)
        async with client.messages.stream(**options) as stream:
            final = await stream.get_final_message()
    for content in (done.content, final.content):
        first, *blocks = content
        assert first.type == "text"
        for block, given in zip(blocks, ARGUMENTS[:3], strict=True):
            assert block.type == "tool_use"
            assert (block.name, block.input) == ("weather", given)


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("said", "kept"),
    [
        (Said("so END", reasoning="an END"), "an "),
        (Said("so END", reasoning="thought"), "thoughtso "),
        (Said("so", tool_calls=[("weather", {"city": "END of Rome"})]), 'so{"city": "'),
    ],
    ids=["reasoning", "text", "call"],
)
async def test_a_stop_sequence_ends_a_message_wherever_it_is(
    said: Said, kept: str, stream: bool
) -> None:
    async with Engine(ScriptedModel([said])) as engine:
        body = {"messages": CHAT, **CALLED, "stop_sequences": ["END"], "max_tokens": 99}
        answer = await ask(create_app(engine), "/v1/messages", {**body, "stream": stream})
        if stream:
            deltas = [each["delta"] for each in answer.events if "delta" in each]
            ended = deltas.pop()
            kinds = ("thinking", "text", "partial_json")
            assert "".join(str(each.get(kind, "")) for each in deltas for kind in kinds) == kept
        else:
            ended = answer.json
            kinds = ("thinking", "text")
            texts = [str(each.get(kind, "")) for each in ended["content"] for kind in kinds]
            # The beginning of a call is no input.
            assert "".join(texts) == kept.partition("{")[0]
        assert (ended["stop_reason"], ended["stop_sequence"]) == ("stop_sequence", "END")


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    "said",
    [
        "<think>\nhm\n</think>\n\nHuman: hi",
        '<tool_call>\n{"name": "weather", "arguments": {"city": "x"}}\n</tool_call>\n\nHuman: 5',
    ],
)
async def test_a_stop_sequence_may_begin_with_white_space(said: str, stream: bool) -> None:
    """It was shown without it, and told as the end of a turn, or as a call."""
    async with Engine(ScriptedModel([said])) as engine:
        body = {"messages": CHAT, **CALLED, "stop_sequences": ["\n\nHuman:"], "max_tokens": 99}
        answer = await ask(create_app(engine), "/v1/messages", {**body, "stream": stream})
    ended = answer.events[-2]["delta"] if stream else answer.json
    assert (ended["stop_reason"], ended["stop_sequence"]) == ("stop_sequence", "\n\nHuman:")
    assert "Human" not in str(answer.events[:-2] if stream else answer.json["content"])


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("stop", "reason"), [("END", "stop"), ("</tool_call>", "tool_calls"), ([], "tool_calls")]
)
async def test_a_call_that_a_stop_string_cuts_short_is_none(
    stop: str | list[str], reason: str, stream: bool
) -> None:
    """Clients go on with the calls of an answer where its reason says so. The string may be one
    token, for which the answer's text has a mark."""
    said = Said(tool_calls=[("weather", {"city": "Rome"}), ("weather", {"city": "END of Rome"})])
    tools = [{"type": "function", "function": {"name": "weather"}}]
    body = {"messages": CHAT, "tools": tools, "stop": stop, "stream": stream}
    async with Engine(ScriptedModel([said])) as engine:
        answer = await ask(create_app(engine), "/v1/chat/completions", body)
        told = [choice for each in answer.events if each for choice in each["choices"]]
        assert told[-1]["finish_reason"] == reason
        assert told[-1].get("stop_reason") == (stop or None)


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("stops", [["23"], ["23", "END"]])
async def test_a_stop_sequence_ends_a_call_that_is_no_json(stops: list[str], stream: bool) -> None:
    """Its arguments come as JSON once their values are whole: what cut one is not seen in them, and
    which of several strings it was could not be told."""
    text = "<tool_call>\n<function=weather>\n<parameter=days>\n123\n</parameter>"
    days = {"type": "object", "properties": {"days": {"type": "integer"}}}
    tools = [{"name": "weather", "input_schema": days}]
    body = {"messages": CHAT, "tools": tools, "stop_sequences": stops, "stream": stream}
    async with Engine(XmlModel([Said(text)])) as engine:
        assert engine.model.tool_format == "qwen-xml"
        answer = await ask(create_app(engine), "/v1/messages", {**body, "max_tokens": 99})
        told = answer.events[-2]["delta"] if stream else answer.json
        assert told["stop_reason"] == "stop_sequence"
        assert told["stop_sequence"] == "23"


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("stop", "status"), [({"stop_regex": "EN."}, "incomplete"), ({}, "completed")]
)
async def test_an_item_of_a_call_that_is_cut_short_is_incomplete(
    stop: dict[str, Any], status: str, stream: bool
) -> None:
    """Its arguments have no end, though the response came to its end."""
    said = Said(tool_calls=[("weather", {"city": "Rome"}), ("weather", {"city": "END of Rome"})])
    tools = [{"type": "function", "name": "weather"}]
    async with Engine(ScriptedModel([said])) as engine:
        body = {"input": "hello", "tools": tools, "stream": stream, **stop}
        answer = await ask(create_app(engine), "/v1/responses", body)
        response = answer.events[-1]["response"] if stream else answer.json
        calls = [each for each in response["output"] if each["type"] == "function_call"]
        assert [each["status"] for each in calls] == ["completed", status]
        if stream:
            assert answer.events[-2]["item"] == calls[-1]


@pytest.mark.parametrize("most", [42, 49])
@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/messages", "/v1/responses"])
async def test_a_call_that_was_cut_short_goes_back_as_it_was_written(path: str, most: int) -> None:
    model = ScriptedModel([Said(tool_calls=[("weather", {"city": "Rome"})]), "So be it."])
    async with Engine(model) as engine:
        app, kind = create_app(engine), path.rpartition("/")[2]
        chat: list[Any] = [{"role": "user", "content": "hello"}]
        tool = {"name": "weather"}
        if kind == "responses":
            asked = {"tools": [{"type": "function", **tool}], "max_output_tokens": most}
            done = (await ask(app, path, {"input": chat, **asked})).json
            (call,) = done["output"]
            kept = call["arguments"]
            output = {"type": "function_call_output", "call_id": call["call_id"], "output": "cut"}
            body = {"input": [*chat, call, output]}
        elif kind == "messages":
            asked = {"tools": [{**tool, "input_schema": {"type": "object"}}], "max_tokens": most}
            done = (await ask(app, path, {"messages": chat, **asked, "stream": True})).events
            (block,) = (each["content_block"] for each in done if "content_block" in each)
            deltas = (each["delta"] for each in done if "delta" in each)
            block["input"] = kept = "".join(each.get("partial_json", "") for each in deltas)
            result = {"type": "tool_result", "tool_use_id": block["id"], "content": "cut"}
            said = [
                {"role": "assistant", "content": [block]},
                {"role": "user", "content": [result]},
            ]
            body = {"messages": [*chat, *said], "max_tokens": most}
        else:
            asked = {"tools": [{"type": "function", "function": tool}], "max_tokens": most}
            done = (await ask(app, path, {"messages": chat, **asked})).json
            message = done["choices"][0]["message"]
            (call,) = message["tool_calls"]
            kept = call["function"]["arguments"]
            result = {"role": "tool", "tool_call_id": call["id"], "content": "cut"}
            body = {"messages": [*chat, message, result]}
        assert (await ask(app, path, body)).status == 200
        assert kept.startswith('{"ci')
        assert json.dumps(kept) in model.prompts[-1][1]["content"]
