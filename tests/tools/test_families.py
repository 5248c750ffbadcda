"""Every family's answers are read alike however they are cut, and say what was said."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from tool_transcripts import (
    MESSAGES,
    SYNTAXES,
    TOOLS,
    Reading,
    Said,
    family_named,
    tokenizer_of,
    written,
)

from asyncinfer.chunk import ToolCallDelta
from asyncinfer.text import Tokenizer
from asyncinfer.tools import families, python_calls
from asyncinfer.tools.delimiters import Delimiters
from asyncinfer.tools.families import family_of
from asyncinfer.tools.output import Output
from asyncinfer.tools.source import Source

HARMONY = "<|channel|><|message|><|start|>"
HARMONY_TOKENS = "<|channel|> <|message|> <|constrain|> <|end|> <|start|> <|call|> <|return|>"


def transcripts(name: str) -> list[tuple[Said, str]]:
    texts = [(said, written(name, said)) for said in MESSAGES]
    return [(said, text) for said, text in texts if text is not None]


def test_every_family_has_its_transcripts_and_its_row() -> None:
    names = {name for name, *_ in families.SYNTAXES}
    page = (Path(__file__).parents[2] / "docs/tools.md").read_text(encoding="utf-8")
    assert names <= SYNTAXES.keys()
    assert {name for name in names if f"`{name}`" not in page} == set()


@pytest.mark.parametrize("name", SYNTAXES)
def test_a_family_is_told_by_its_template(name: str) -> None:
    assert family_named(name).name == name.removesuffix("-spelled")


@pytest.mark.parametrize("name", SYNTAXES)
def test_a_family_has_thirty_transcripts(name: str) -> None:
    assert len(transcripts(name)) >= 30


@pytest.mark.parametrize("name", SYNTAXES)
def test_what_was_said_is_read(name: str) -> None:
    reading = Reading(family_named(name), tokenizer_of(SYNTAXES[name]))
    for said, text in transcripts(name):
        content, reasoning, calls = reading.parse(reading.marked(text))
        assert (content, reasoning) == (said.content, said.reasoning), text
        assert [(call[1], json.loads(call[2])) for call in calls] == list(said.calls), text


@pytest.mark.parametrize("name", SYNTAXES)
def test_every_split_reads_alike(name: str) -> None:
    reading = Reading(family_named(name), tokenizer_of(SYNTAXES[name]))
    for _, text in transcripts(name):
        marked = reading.marked(text)
        whole = reading.parse(marked)
        assert reading.parse(*marked) == whole
        for at in range(1, len(marked)):
            assert reading.parse(marked[:at], marked[at:]) == whole, (marked[:at], marked[at:])


@pytest.mark.parametrize("name", SYNTAXES)
def test_every_cut_reads_alike(name: str) -> None:
    """An answer may end anywhere."""
    reading = Reading(family_named(name), tokenizer_of(SYNTAXES[name]))
    for _, text in transcripts(name)[::3]:
        marked = reading.marked(text)
        for end in range(1, len(marked), 2):
            cut = marked[:end]
            assert reading.parse(*cut) == reading.parse(cut), cut


@pytest.mark.parametrize("name", ["hermes", "llama-json", "mistral", "deepseek-v3.1", "json"])
def test_arguments_in_json_are_what_the_model_wrote(name: str) -> None:
    """Not even white space changes, and the spelling of a number does not."""
    reading = Reading(family_named(name), tokenizer_of(SYNTAXES[name]))
    written = '{ "city":"\\u0050aris" ,\n "days" : 3.0e0 }'
    text = SYNTAXES[name].write((("get_weather", {}),)).replace("{}", written)
    assert reading.parse(reading.marked(text))[2][0][2] == written


@pytest.mark.parametrize("name", ["hermes", "qwen-xml", "mistral", "deepseek-v3.1", "gemma"])
def test_a_text_that_spells_a_delimiter_stays_text(name: str) -> None:
    syntax = SYNTAXES[name]
    reading = Reading(family_named(name), tokenizer_of(syntax))
    text = syntax.write((("now", {}),))
    # As ordinary tokens spell it, no mark is in it.
    assert reading.parse(text) == (text.rstrip(), "", [])
    assert reading.parse(reading.marked(text))[2] == [("call0", "now", "{}")]


@pytest.mark.parametrize(
    ("name", "text", "content", "calls"),
    [
        ("hermes", "<tool_call>\nno json\n</tool_call>", "<tool_call>\nno json\n</tool_call>", 0),
        ("hermes", '<tool_call>{"name": "unknown", "arguments": {}}</tool_call>', None, 0),
        ("hermes", '<tool_call>{"arguments": {"a": 1}, "name": "now"}</tool_call>', "", 1),
        ("hermes", '<tool_call>{"name": "now"}</tool_call>', "", 1),
        ("hermes", '<tool_call>{"name": "now", "arguments": "{\\"a\\": 1}"}</tool_call>', "", 1),
        ("hermes", '<tool_call>{"name": "now", "arguments": {"a": "x</tool_call> y', "y", 1),
        ("qwen-xml", "<tool_call>\n<function=nobody>\n</function>\n</tool_call>", None, 0),
        ("llama-json", '{"answer": 42}', '{"answer": 42}', 0),
        ("llama-json", '{"name": "Bob", "parameters": {}}', '{"name": "Bob", "parameters": {}}', 0),
        ("llama-json", '<|python_tag|>{"name": "now", "parameters": {}}', "", 1),
        ("llama-python", "[1, 2, 3]", "[1, 2, 3]", 0),
        ("llama-python", "[now(), nobody()]", "nobody()]", 1),
        ("mistral", "[TOOL_CALLS]now[CALL_ID]abc[ARGS]{}", "", 1),
        ("json", '{"name": "now", "arguments": {}}', "", 1),
        ("mistral", '[TOOL_CALLS]nobody[ARGS]{"a": 1} after', 'nobody{"a": 1} after', 0),
        ("hermes", '<tool_call>{"name": "now"}}</tool_call> So.', "So.", 1),
        ("hermes", '<tool_call>{"name": "now"} So.', "So.", 1),
        ("hermes", '<tool_call>{"name": "now"}<tool_call>{"name": "now"} So.', "So.", 2),
    ],
)
def test_what_is_no_call_is_not_lost(name: str, text: str, content: str | None, calls: int) -> None:
    reading = Reading(family_named(name), tokenizer_of(SYNTAXES[name]))
    marked = reading.marked(text)
    found = reading.parse(marked)
    assert len(found[2]) == calls
    assert found == reading.parse(*marked)
    if content is None:
        assert found[0], "the text is shown"
    else:
        assert found[0] == content


@pytest.mark.parametrize(
    ("text", "content"),
    [
        ("One.\n\n{} Two.", "One.\n\nTwo."),
        ("One.{} Two.", "One. Two."),
        ("One.{}Two.", "One.\nTwo."),
    ],
)
def test_text_around_calls_stays_apart_as_it_was(text: str, content: str) -> None:
    reading = Reading(family_named("hermes"), tokenizer_of(SYNTAXES["hermes"]))
    for calls in (1, 2):
        call = SYNTAXES["hermes"].write((("now", {}),)) * calls
        marked = reading.marked(text.replace("{}", call))
        assert reading.parse(marked)[0] == reading.parse(*marked)[0] == content


def arguments_of(name: str, text: str) -> list[str]:
    reading = Reading(family_named(name), tokenizer_of(SYNTAXES[name]))
    marked = reading.marked(text)
    found = reading.parse(marked)[2]
    assert reading.parse(*marked)[2] == found
    return [arguments for *_, arguments in found]


def test_arguments_are_read_once() -> None:
    twice = '{"name": "save", "arguments": {"share": 1}, "parameters": {"share": 2}}'
    assert arguments_of("json", twice) == ['{"share": 1}']
    assert arguments_of("json", '{"name": "now", "arguments": null}') == ["{}"]


def test_arguments_without_names_are_those_at_their_places() -> None:
    first, second = [*next(tool for tool in TOOLS if tool.name == "save").schema["properties"]][:2]
    (found,) = arguments_of("llama-python", "[save('Oslo', 3)]")
    assert json.loads(found) == {first: "Oslo", second: 3}
    assert arguments_of("llama-python", "[now(1)]") == [""]


def test_a_call_of_an_unknown_tool_is_shown() -> None:
    name = "deepseek-v3.1"
    text = written(name, next(said for said in MESSAGES if len(said.calls) == 2))
    assert text is not None
    reading = Reading(family_named(name), tokenizer_of(SYNTAXES[name]))
    known = reading.parse(reading.marked(text))[2]
    text = text.replace(known[0][1], "nobody", 1)
    content, _, calls = reading.parse(reading.marked(text))
    assert len(calls) == len(known) - 1
    assert "nobody" in content
    assert known[0][2] in content


@pytest.mark.parametrize("name", ["qwen-xml", "glm", "gemma", "function-gemma", "llama-python"])
@pytest.mark.parametrize("value", ["NaN", "-Infinity", "[1, NaN]", "['a', 1e999]"])
def test_a_value_that_json_has_not_is_a_text(name: str, value: str) -> None:
    """Clients send it back as JSON, which the server refused."""

    def refused(constant: str) -> None:
        raise AssertionError(constant)

    reading = Reading(family_named(name), tokenizer_of(SYNTAXES[name]))
    call = SYNTAXES[name].write((("save", {"share": 2.5}),)).replace("2.5", value)
    ((_, _, arguments),) = reading.parse(reading.marked(call))[2]
    assert "share" in json.loads(arguments, parse_constant=refused)


def the_argument(name: str, value: str) -> object:
    """What a call's argument says that the model writes as `value`."""
    reading = Reading(family_named(name), tokenizer_of(SYNTAXES[name]))
    call = SYNTAXES[name].write((("save", {"share": 2.5}),)).replace("2.5", value)
    ((_, _, arguments),) = reading.parse(reading.marked(call))[2]
    return json.loads(arguments)["share"]


def test_python_is_parsed_up_to_a_bound() -> None:
    """An event loop parses it: an f-string of 300,000 characters kept it for six seconds."""
    longest = f"['{'a' * (python_calls.MOST_PARSED - 4)}']"
    assert the_argument("llama-python", longest) == [longest[2:-2]]
    longer = longest.replace("a", "aa", 1)
    assert the_argument("llama-python", longer) == longer


@pytest.mark.parametrize("quote", ["'", '"'])
def test_one_string_of_python_has_a_bound_of_its_own(quote: str) -> None:
    """A file may be an argument."""
    inside = "\\x41\\\\ü" * (python_calls.MOST_IN_STRING // 7)
    said = inside.replace("\\x41", "A").replace("\\\\", "\\")
    assert the_argument("llama-python", f"{quote}{inside}{quote}") == said
    longer = f"{quote}{inside}{inside}{quote}"
    assert the_argument("llama-python", longer) == longer


@pytest.mark.parametrize("name", ["gemma", "function-gemma", "llama-python"])
def test_a_name_of_python_is_a_value(name: str) -> None:
    assert [the_argument(name, value) for value in ("True", "None")] == [True, None]


def test_reasoning_that_the_prompt_opened_is_read() -> None:
    family = family_named("hermes")
    assert family.thinking("<|im_start|>assistant\n<think>\n")
    assert not family.thinking("<|im_start|>assistant\n<think>\n\n</think>\n\n")
    reading = Reading(family, tokenizer_of(SYNTAXES["hermes"]), thinking=True)
    text = 'so <tool_call> it is\n</think>\n\n<tool_call>{"name": "now"}</tool_call>'
    found = reading.parse(reading.marked(text))
    assert found == ("", "so <tool_call> it is", [("call0", "now", "{}")])


def harmony(said: Said) -> str:
    """An answer of gpt-oss, whose last message ends with a token that is not shown."""
    parts = []
    if said.reasoning:
        parts.append(f"<|channel|>analysis<|message|>{said.reasoning}<|end|>")
    if said.content:
        channel = "commentary" if said.calls else "final"
        parts.append(f"<|channel|>{channel}<|message|>{said.content}<|end|>")
    for name, arguments in said.calls:
        to = f"<|channel|>commentary to=functions.{name} <|constrain|>json<|message|>"
        parts.append(f"{to}{json.dumps(arguments, ensure_ascii=False)}<|call|>")
    return "<|start|>assistant".join(parts)


def test_harmony() -> None:
    family = family_of(HARMONY, reads_tools=True)
    syntax = SYNTAXES["hermes"]
    tokenizer: Tokenizer = tokenizer_of(type(syntax)("", syntax.write, HARMONY_TOKENS))
    reading = Reading(family, tokenizer)
    for said in MESSAGES:
        marked = reading.marked(harmony(said))
        whole = reading.parse(marked)
        assert whole[:2] == (said.content, said.reasoning)
        assert [(call[1], json.loads(call[2])) for call in whole[2]] == list(said.calls)
        assert reading.parse(*marked) == whole
        for at in range(1, len(marked)):
            assert reading.parse(marked[:at], marked[at:]) == whole
            assert reading.parse(*marked[:at]) == reading.parse(marked[:at])


class Piece(str):
    """A text that nothing is added to one by one: each time all before it would be copied."""

    __slots__ = ()

    def __radd__(self, before: str) -> str:
        raise AssertionError("what came before is copied")


def test_pieces_of_arguments_are_joined_once() -> None:
    """A quote is a piece of its own: a call of 500,000 of them would take nine seconds."""
    source = Source(Delimiters(tokenizer_of(SYNTAXES["hermes"]), ()))
    output = Output(source, lambda: "call-0")
    output.call("save")
    for _ in range(3):
        output.arguments(Piece("ab"))
    (call,) = output.taken().tool_calls
    assert call == ToolCallDelta(0, "call-0", "save", "ababab")
