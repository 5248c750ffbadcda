"""What a chunk of several tokens holds is told in the order in which the model wrote it."""

from __future__ import annotations

from typing import Any

import pytest
from server.chat_model import CHAT, ChatModel, ask

from asyncinfer import Engine
from asyncinfer.server import create_app
from asyncinfer.testing import Said, ScriptedModel

pytestmark = pytest.mark.anyio

CALL = '<tool_call>\n{"name": "add", "arguments": {"a": 1}}\n</tool_call>'
TOOL = {"name": "add", "parameters": {"type": "object", "properties": {"a": {"type": "integer"}}}}


@pytest.mark.parametrize("interval", [1, 8, 20])
async def test_a_call_ends_before_the_text_after_it(interval: int) -> None:
    said = f"Sure.\n{CALL}\nNow wait."
    async with Engine(ScriptedModel([said] * 2)) as engine:
        app = create_app(engine)
        body = {"stream": True, "stream_interval": interval}
        tools = [{"type": "function", **TOOL}]
        answer = await ask(app, "/v1/responses", {**body, "input": "hi", "tools": tools})
        items = answer.events[-1]["response"]["output"]
        assert [(each["type"], each.get("arguments")) for each in items] == [
            ("message", None),
            ("function_call", '{"a": 1}'),
            ("message", None),
        ]
        assert [each["content"][0]["text"] for each in (items[0], items[2])] == [
            "Sure.",
            "Now wait.",
        ]
        tools = [{"name": "add", "input_schema": TOOL["parameters"]}]
        body |= {"messages": CHAT, "tools": tools, "max_tokens": 200}
        answer = await ask(app, "/v1/messages", body)
        begun = [each["content_block"] for each in answer.events if "content_block" in each]
        assert [each["type"] for each in begun] == ["text", "tool_use", "text"]
        parts = [each["delta"].get("partial_json", "") for each in answer.events if "delta" in each]
        assert "".join(parts) == '{"a": 1}'


async def test_a_whole_answer_is_in_the_order_of_the_events() -> None:
    said = f"Sure.\n{CALL}\nNow wait.\n{CALL.replace('1', '2')}\n{CALL}"
    async with Engine(ScriptedModel([said] * 4)) as engine:
        app = create_app(engine)
        # Which cuts the last call short.
        most = len(engine.tokenizer.encode(said.removesuffix("}}\n</tool_call>")))
        body: dict[str, Any] = {"tools": [{"type": "function", **TOOL}], "max_output_tokens": most}
        body["input"] = "hi"
        whole = (await ask(app, "/v1/responses", body)).json
        last = (await ask(app, "/v1/responses", {**body, "stream": True})).events[-1]["response"]
        for output in (whole["output"], last["output"]):
            kinds = ["message", "function_call", "message", "function_call", "function_call"]
            assert [item.pop("type") for item in output] == kinds
            for item in output:
                item.pop("id")
                item.pop("call_id", None)
        assert whole["output"] == last["output"]
        assert whole["usage"]["output_tokens"] == last["usage"]["output_tokens"]

        tools = [{"name": "add", "input_schema": TOOL["parameters"]}]
        body = {"messages": CHAT, "tools": tools, "max_tokens": most}
        whole = (await ask(app, "/v1/messages", body)).json
        events = (await ask(app, "/v1/messages", {**body, "stream": True})).events
        assert [
            (each["type"], each.get("text", each.get("input"))) for each in whole["content"]
        ] == [
            ("text", "Sure."),
            ("tool_use", {"a": 1}),
            ("text", "Now wait."),
            ("tool_use", {"a": 2}),
            ("tool_use", {}),
        ]
        begun = [each["content_block"]["type"] for each in events if "content_block" in each]
        assert [each["type"] for each in whole["content"]] == begun
        assert whole["stop_reason"] == events[-2]["delta"]["stop_reason"]
        assert whole["usage"]["output_tokens"] == events[-2]["usage"]["output_tokens"]


@pytest.mark.parametrize("tools", [[], [{"name": "add", "input_schema": {"type": "object"}}]])
async def test_a_message_of_nothing_has_an_empty_text(tools: list[Any]) -> None:
    async with Engine(ScriptedModel([Said("", reasoning="hm")])) as engine:
        body = {"messages": CHAT, "tools": tools, "max_tokens": 99}
        content = (await ask(create_app(engine), "/v1/messages", body)).json["content"]
        assert [each["type"] for each in content] == ["thinking", "text"]
        assert (content[0]["thinking"], content[1]["text"]) == ("hm", "")


@pytest.mark.parametrize("reasoning", ["", "hmm"])
async def test_logprobs_open_no_message(reasoning: str) -> None:
    async with Engine(ScriptedModel([Said("Hi", reasoning=reasoning)] * 2)) as engine:
        body = {"input": "hello", "top_logprobs": 1}
        whole = (await ask(create_app(engine), "/v1/responses", body)).json["output"]
        answer = await ask(create_app(engine), "/v1/responses", {**body, "stream": True})
        streamed = answer.events[-1]["response"]["output"]
        kinds = ["reasoning", "message"] if reasoning else ["message"]
        assert [each["type"] for each in streamed] == kinds
        # Whole, the tokens of the reasoning are the message's, too.
        assert streamed[-1]["content"] == whole[-1]["content"]
        added = [each for each in answer.events if each["type"] == "response.output_item.added"]
        assert len(added) == len(kinds)


async def test_logprobs_of_a_call_are_no_message() -> None:
    tools = [{"type": "function", **TOOL}]
    body = {"input": "hi", "tools": tools, "top_logprobs": 1, "stream": True}
    async with Engine(ScriptedModel([CALL])) as engine:
        answer = await ask(create_app(engine), "/v1/responses", body)
        output = answer.events[-1]["response"]["output"]
        assert [each["type"] for each in output] == ["function_call"]


def _listed(text: str) -> list[dict[str, str]]:
    return [{"type": "text", "text": text}]


async def test_parts_of_text_are_told_as_one_text() -> None:
    """Also where the template knows no tools, and calls and results are written as text."""
    call = {"id": "c", "type": "function", "function": {"name": "add", "arguments": '{"a": 1}'}}

    def chat(text: Any) -> list[dict[str, Any]]:
        return [
            {"role": "system", "content": text("Be brief.")},
            {"role": "user", "content": text("hi")},
            {"role": "assistant", "content": text("Let me look."), "tool_calls": [call]},
            {"role": "tool", "tool_call_id": "c", "content": text("3")},
            {"role": "assistant", "content": text("So it")},
        ]

    async with Engine(ChatModel()) as engine:
        plain, parts = (
            engine.tokenizer.render_chat(chat(text), tools=[TOOL], continue_final_message=True)
            for text in (str, _listed)
        )
    assert parts == plain
    assert "Let me look." in plain
    assert "Result of add:\n3" in plain
    assert plain.endswith("<assistant>So it")


async def test_the_answer_goes_on_with_a_message_that_has_begun() -> None:
    """As Anthropic's protocol has it."""
    model = ChatModel()
    begun = [*CHAT, {"role": "assistant", "content": '{"a": '}]
    async with Engine(model) as engine:
        for options, more in (({}, True), ({"continue_final_message": False}, False)):
            body = {"messages": begun, "max_tokens": 2, **options}
            used = (await ask(create_app(engine), "/v1/messages", body)).json["usage"]
            prompt = engine.tokenizer.encode_chat(begun, continue_final_message=more)
            assert used["input_tokens"] + used["cache_read_input_tokens"] == len(prompt)


async def test_what_no_server_keeps_is_called_by_its_own_name() -> None:
    async with Engine(ChatModel()) as engine:
        body = {"input": "hi", "prompt": {"id": "p"}}
        answer = await ask(create_app(engine), "/v1/responses", body)
        assert (answer.status, answer.json["error"]["param"]) == (400, "prompt")
        assert answer.json["error"]["message"].startswith("prompt={'id': 'p'}: is not served")


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("prompts", "place"),
    [
        ([[5], [10**9]], "prompt[1][0]"),
        (["ok", [1, True]], "prompt[1][1]"),
        (["ok", "x" * 30_000], "prompt[1]"),
        ([10**9], "prompt[0]"),
        ("x" * 30_000, "prompt"),
    ],
)
async def test_an_error_names_the_prompt_among_several(
    prompts: Any, place: str, stream: bool
) -> None:
    async with Engine(ChatModel()) as engine:
        body = {"prompt": prompts, "max_tokens": 3, "stream": stream}
        answer = await ask(create_app(engine), "/v1/completions", body)
        assert (answer.status, answer.json["error"]["param"]) == (400, place)


async def test_an_error_names_the_text_that_is_embedded() -> None:
    long = "x " * 3_000
    cases = [
        (["ok"] * 128 + [long], "input[128]"),
        (["ok"] * 2049, "input"),
        ([[5], [10**9]], "input[1][0]"),
        ([long], "input[0]"),
        (long, "input"),
        ([10**9], "input[0]"),
    ]
    async with Engine() as engine:
        app = create_app(engine)
        for texts, place in cases:
            answer = await ask(app, "/v1/embeddings", {"input": texts})
            assert (answer.status, answer.json["error"]["param"]) == (400, place)


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("n", [1, 2])
async def test_offsets_count_the_characters_of_the_text(stream: bool, n: int) -> None:
    text = "h\u00e9llo \N{PARTY POPPER}\N{PARTY POPPER} end"
    starts = [at for at, char in enumerate(text) for _ in char.encode()]
    async with Engine(ScriptedModel([text] * n)) as engine:
        body = {"prompt": "go", "max_tokens": 99, "logprobs": 1, "n": n, "stream": stream}
        answer = await ask(create_app(engine), "/v1/completions", body)
        found: dict[int, list[int]] = {index: [] for index in range(n)}
        for each in answer.events if stream else [answer.json]:
            for choice in each["choices"] if each else ():
                if choice["logprobs"] is not None:
                    found[choice["index"]] += choice["logprobs"]["text_offset"]
        # The last token ends the answer.
        assert all(offsets in (starts, [*starts, len(text)]) for offsets in found.values())
