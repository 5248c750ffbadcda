"""Answers that reason first and fit a format after it, and templates that know little."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from tool_transcripts import SYNTAXES, TOOLS, Reading, family_named, tokenizer_of

from asyncinfer import Engine, InvalidRequest, RequestFailed
from asyncinfer.grammar import GrammarCompiler
from asyncinfer.structured_output import AnswerFormat
from asyncinfer.testing import ScriptedModel
from asyncinfer.text import ChatTemplate
from asyncinfer.tools.families import family_of

pytestmark = pytest.mark.asyncio
HI = [{"role": "user", "content": "hi"}]
ADD = {"name": "add", "parameters": {"type": "object", "properties": {"a": {"type": "integer"}}}}
SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": {"a": {"type": "integer"}},
    "required": ["a"],
    "additionalProperties": False,
}
_BODY = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n"
)
#: A template that opens the reasoning, as those of models that always reason, and one that knows
#: its tags.
OPENED = _BODY + "<think>\n{# </think> #}{% endif %}"
KNOWN = _BODY + "{# </think> #}{% endif %}"


class Templated(ScriptedModel):
    """A scripted model with a chat template of the test's."""

    def __init__(self, template: str, script: Any) -> None:
        super().__init__(script)
        self._template = template

    def load(self, *args: Any, **options: Any) -> Any:
        loaded = super().load(*args, **options)
        shield = loaded.tokenizer.shield
        return replace(loaded, template=ChatTemplate(self._template, shield=shield))


@pytest.mark.parametrize(
    "asked",
    [
        {"json_schema": SCHEMA},
        {"json_object": True},
        {"regex": r'\{"a": 1\}'},
        {"choice": ['{"a": 1}', "no"]},
        {"json_schema": SCHEMA, "constrain_after": "</think>"},
    ],
)
async def test_a_format_holds_after_the_reasoning_that_the_prompt_opened(
    asked: dict[str, Any],
) -> None:
    """The JSON was the reasoning, and the answer empty."""
    async with Engine(Templated(OPENED, ['hm\n</think>\n\n{"a": 1}', '{"a": 1}'])) as engine:
        done = await engine.generate(HI, **asked)
        assert (done.text, done.reasoning, done.finish_reason) == ('{"a": 1}', "hm", "stop")
        if "json_schema" in asked or "json_object" in asked:
            assert done.parsed == {"a": 1}
        with pytest.raises(RequestFailed, match="does not fit"):
            await engine.generate(HI, json_schema=SCHEMA)


async def test_an_answer_with_a_format_may_reason_first() -> None:
    said = ['<think>\nhm\n</think>\n\n{"a": 1}', '{"a": 2}']
    async with Engine(Templated(KNOWN, said)) as engine:
        done = await engine.generate(HI, json_schema=SCHEMA)
        assert (done.parsed, done.reasoning) == ({"a": 1}, "hm")
        done = await engine.generate(HI, json_schema=SCHEMA)
        assert (done.parsed, done.reasoning) == ({"a": 2}, "")


async def test_the_last_message_of_harmony_fits_a_format() -> None:
    marks = "<|channel|> <|message|> <|constrain|> <|end|> <|start|> <|call|> <|return|>"
    tokenizer = tokenizer_of(type(SYNTAXES["hermes"])("", SYNTAXES["hermes"].write, marks))
    reading = Reading(family_of(marks, reads_tools=True), tokenizer, ())
    form = reading.reader.after_reasoning(AnswerFormat("regex", "[0-9]{2}"))
    thought = "<|channel|>analysis<|message|>Hm.<|end|><|start|>assistant"
    final = "<|channel|>final<|message|>"
    compiler = GrammarCompiler(tokenizer, tokenizer.vocab_size)
    for text, fits in ((f"{thought}{final}42", True), (f"{final}42", True), ("42", False)):
        (matcher,) = compiler.matchers(form, 1, 0)
        ids = tokenizer.encode(text, add_special_tokens=False)
        assert (matcher.fitting(ids) == len(ids)) == fits, text
    assert reading.parse(reading.marked(f"{thought}{final}42")) == ("42", "Hm.", [])


@pytest.mark.parametrize("choice", ["auto", "required", "add"])
@pytest.mark.parametrize(("template", "begin"), [(OPENED, ""), (KNOWN, "<think>\n")])
async def test_a_call_without_an_opening_is_read_after_the_reasoning(
    template: str, begin: str, choice: str
) -> None:
    """It was told as content."""
    said = begin + 'I need it.\n</think>\n\n{"name": "add", "arguments": {"a": 1}}'
    async with Engine(Templated(template, [said])) as engine:
        assert engine.model.tool_format == "json"
        done = await engine.generate(HI, tools=[ADD], tool_choice=choice)
        assert [(call.name, call.parsed) for call in done.tool_calls] == [("add", {"a": 1})]
        assert (done.reasoning, done.text) == ("I need it.", "")


async def test_a_message_that_goes_on_within_its_reasoning_reasons() -> None:
    begun = [*HI, {"role": "assistant", "content": "<think>\nLet me"}]
    async with Engine(Templated(KNOWN, [" see.</think>Hi"])) as engine:
        done = await engine.generate(begun, continue_final_message=True)
    assert (done.reasoning, done.text) == ("see.", "Hi")


async def test_a_stop_string_may_hold_a_delimiter_and_more() -> None:
    async with Engine(ScriptedModel(["<think>\nhm\n</think>\n\nhello there"])) as engine:
        done = await engine.generate(HI, stop=["</think>\n\nhello"])
    assert (done.reasoning.strip(), done.text, done.finish_reason) == ("hm", "", "stop")


async def test_text_that_goes_on_after_a_call_begins_a_line() -> None:
    call = '<tool_call>\n{"name": "add", "arguments": {"a": 1}}\n</tool_call>'
    said = [f"I look.\n\n{call}\nNow wait. {call} End.", f"Look.{call}Wait."]
    async with Engine(ScriptedModel(said)) as engine:
        assert (await engine.generate(HI, tools=[ADD])).text == "I look.\n\nNow wait. End."
        assert (await engine.generate(HI, tools=[ADD])).text == "Look.\nWait."


@pytest.mark.parametrize("name", ["hermes", "hermes-spelled"])
@pytest.mark.parametrize("parallel", [False, True])
async def test_calls_side_by_side_are_held_to_the_request(name: str, parallel: bool) -> None:
    tokenizer = tokenizer_of(SYNTAXES[name])
    reading = Reading(family_named(name), tokenizer, parallel=parallel)
    form = reading.reader.grammar()
    assert form is not None
    call = '<tool_call>\n{"name": "now", "arguments": {}}\n</tool_call>'
    (matcher,) = GrammarCompiler(tokenizer, tokenizer.vocab_size).matchers(form, 1, 0)
    ids = tokenizer.encode(f"Look: {call}\n{call}", add_special_tokens=False)
    assert (matcher.fitting(ids) == len(ids)) == parallel
    (matcher,) = GrammarCompiler(tokenizer, tokenizer.vocab_size).matchers(form, 1, 0)
    ids = tokenizer.encode(f"Look: {call}\nand <tool_ that is all", add_special_tokens=False)
    assert matcher.fitting(ids) == len(ids)


@pytest.mark.parametrize("name", ["hermes", "mistral", "qwen-xml"])
async def test_calls_that_may_be_left_out_are_held_to_what_can_be_held(name: str) -> None:
    """One tool of many made each conversation a bad request."""
    odd = {
        "type": "object",
        "properties": {
            "tags": {"type": "array", "items": {"type": "string"}, "uniqueItems": True},
            "path": {"type": "string", "format": "path"},
            "none": {"type": "string", "format": ["a list"]},
            "text": {"type": "string", "maxLength": 100_000},
            "not": {"oneOf": [{"type": "string"}, {"type": "string", "minLength": 1}]},
        },
    }
    tools = [ADD, {"name": "odd", "parameters": odd}]
    async with Engine(ScriptedModel(["Hi.", "Hi."])) as engine:
        exact = {"type": "object", "properties": {"id": {"type": "integer", "enum": [2**60 + 1]}}}
        found = await engine.generate(HI, tools=[*tools, {"name": "exact", "parameters": exact}])
        assert found.text == "Hi."
        with pytest.raises(InvalidRequest, match=r"^tools/odd/properties/tags=.*uniqueItems"):
            await engine.generate(HI, tools=tools, tool_choice="required")
    tokenizer = tokenizer_of(SYNTAXES[name])
    assert family_of("", False).name == "json"
    reader = Reading(family_named(name), tokenizer, TOOLS).reader
    assert reader.loosened({"now"}).tools.keys() == reader.tools.keys()


#: As published templates of Gemma 2 and 3 begin.
TURNS = """{%- for m in messages -%}
{%- if (m.role == 'user') != (loop.index0 % 2 == 0) -%}{{ raise_exception("must alternate") }}
{%- endif -%}{{ m.role }}: {{ m.content }}
{% endfor -%}"""
NO_SYSTEM = "{% if messages[0].role == 'system' %}{{ raise_exception('no system') }}{% endif %}"
FIRST = "{%- if messages[0].role == 'system' -%}{%- set messages = messages[1:] -%}{%- endif -%}"


@pytest.mark.parametrize("template", [NO_SYSTEM + TURNS, FIRST + TURNS])
async def test_a_round_of_tools_fits_templates_that_want_turns(template: str) -> None:
    calls = '{"name": "add", "arguments": {"a": 1}}\n{"name": "add", "arguments": {"a": 2}}'
    async with Engine(Templated(template, [calls, "Three."])) as engine:
        done = await engine.generate(HI, tools=[ADD])
        results = [
            {"role": "tool", "tool_call_id": call.id, "content": str(call.parsed["a"])}
            for call in done.tool_calls
        ]
        assert len(results) == 2
        chat = [*HI, done.message, *results, {"role": "user", "content": "So?"}]
        text = engine.tokenizer.render_chat(chat, tools=[ADD])
        assert "user: Result of add:\n1\n\nResult of add:\n2\n\nSo?" in text
        assert ("You can call these tools" in text) == (template == NO_SYSTEM + TURNS)
        assert (await engine.generate(chat, tools=[ADD])).text == "Three."
