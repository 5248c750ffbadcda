"""Descriptions of a checkpoint's answers become the syntaxes there are, or are not followed."""

from __future__ import annotations

import json
from copy import deepcopy
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from tool_transcripts import MESSAGES, SYNTAXES, TOOLS, Reading, Said, tokenizer_of
from transformers.cli.serving.utils import get_response_template
from transformers.utils.chat_parsing import parse_response

from asyncinfer import EngineConfig, SyncEngine
from asyncinfer.engine import Loaded
from asyncinfer.errors import ModelLoadError
from asyncinfer.testing import FakeModel
from asyncinfer.text import ChatTemplate
from asyncinfer.tools import ToolFamily, family_of, response_notes
from asyncinfer.tools.described import Undescribed, described
from asyncinfer.tools.family import Span

#: Model types of transformers, and the family that their chat templates tell.
READY = {"qwen3": "hermes", "qwen3_5": "qwen-xml", "gemma4": "gemma"}
JSON: dict[str, Any] = {
    "start_anchor": "<bot>",
    "fields": {
        "thinking": {"open": "<ponder>", "close": "</ponder>"},
        "content": {"close": "<eos>"},
        "tool_calls": {
            "open_pattern": r"\s*<do>",
            "close": "</do>",
            "content": "json",
            "repeats": True,
            "transform": {
                "type": "function",
                "function": {"name": "{content.name}", "arguments": "{content.parameters}"},
            },
        },
    },
}
NAMED = deepcopy(JSON)
NAMED["fields"]["tool_calls"] = {
    "open_pattern": r"\s*<do\.(?P<name>[\w.-]+)>",
    "close": "</do>",
    "content": "json",
    "repeats": True,
    "transform": {"type": "function", "function": {"name": "{name}", "arguments": "{content}"}},
}
LISTED = deepcopy(JSON)
LISTED["fields"]["tool_calls"] = {
    "open": "<all>",
    "close": "</all>",
    "content": "json",
    "transform_each": True,
    "transform": {"type": "function", "function": {"name": "{name}", "arguments": "{arguments}"}},
}


def answer(template: str, said: Said) -> str:
    """As a model with one of the descriptions above writes it."""
    parts = [f"<ponder>\n{said.reasoning}\n</ponder>\n"] if said.reasoning else []
    parts.append(said.content)
    dumped = [(name, json.dumps(args, ensure_ascii=False)) for name, args in said.calls]
    match template:
        case "json":
            calls = [f'<do>{{"name": "{n}", "parameters": {a}}}</do>' for n, a in dumped]
        case "named":
            calls = [f"<do.{name}>{args}</do>" for name, args in dumped]
        case _:
            each = ", ".join(f'{{"name": "{n}", "arguments": {a}}}' for n, a in dumped)
            calls = [f"<all>[{each}]</all>"] if dumped else []
    return "\n".join([*parts, *calls] if said.content else [*parts[:-1], *calls])


@pytest.mark.parametrize(("model_type", "name"), READY.items())
def test_the_descriptions_of_transformers_are_our_families(model_type: str, name: str) -> None:
    model: Any = SimpleNamespace(config=SimpleNamespace(model_type=model_type))
    template = get_response_template(SimpleNamespace(), model)
    assert template is not None
    ours, told = family_of(SYNTAXES[name].template, reads_tools=True), described(template)
    assert told.calls == ours.calls
    assert told.reasoning == ours.reasoning


@pytest.mark.parametrize(
    ("name", "template"), {"json": JSON, "named": NAMED, "listed": LISTED}.items()
)
def test_what_was_said_is_read_as_transformers_reads_it(
    name: str, template: dict[str, Any]
) -> None:
    family = family_of("{{ tools }}", reads_tools=True, response=template)
    assert family.name == "response_template"
    syntax = type(SYNTAXES["json"])("", SYNTAXES["json"].write, "", "<do> </do> <all> </all>")
    for said in MESSAGES:
        text = answer(name, said)
        reading = Reading(family, tokenizer_of(syntax))
        marked = reading.marked(text)
        whole = reading.parse(marked)
        content, reasoning, calls = whole
        assert (content, reasoning) == (said.content, said.reasoning), text
        assert [(call[1], json.loads(call[2])) for call in calls] == list(said.calls), text
        assert reading.parse(*marked) == whole
        for at in range(1, len(marked)):
            assert reading.parse(marked[:at], marked[at:]) == whole
        theirs = parse_response(text, template, prefix="<bot>")
        assert theirs.get("thinking", "") == reasoning
        made = [
            (each["function"]["name"], each["function"]["arguments"])
            for each in theirs.get("tool_calls", ())
        ]
        assert made == list(said.calls)


def test_calls_are_held_to_their_schemas() -> None:
    """The description gives a grammar as well as a parser."""
    for template in (JSON, NAMED, LISTED):
        family = described(template)
        reading = Reading(family, tokenizer_of(SYNTAXES["hermes"]))
        rules = family.rules(
            TOOLS[:1], reading.reader.delimiters, thinking=False, must_call=True, parallel=True
        )
        assert rules is not None
        assert "now" in rules


@pytest.mark.parametrize(
    ("path", "value", "place"),
    [
        ("version", 2, "version=2"),
        ("fields", [], "fields"),
        ("fields.citations", {}, "fields.citations"),
        ("fields.content.open", "<say>", "fields.content"),
        ("fields.thinking.close", None, "fields.thinking"),
        ("fields.tool_calls.content", "kv-lines", "fields.tool_calls.transform"),
        ("fields.tool_calls.open_pattern", "(a+)+b", r"fields.tool_calls.open_pattern: '\(a"),
        ("fields.tool_calls.open_pattern", "a" * 600, "fields.tool_calls.open_pattern"),
        ("fields.tool_calls.open_pattern", "<(?P<name>a)>", "fields.tool_calls.open"),
        ("fields.tool_calls.repeats", False, "fields.tool_calls.repeats"),
        ("fields.tool_calls.transform", {"function": "{x}"}, "fields.tool_calls.transform"),
        ("fields.tool_calls.close", ["</do>", "</did>"], "fields.tool_calls.close"),
    ],
)
def test_what_no_syntax_says_is_not_followed(path: str, value: Any, place: str) -> None:
    template: Any = deepcopy(JSON)
    *way, last = path.split(".")
    inner = template
    for name in way:
        inner = inner[name]
    if value is None:
        del inner[last]
    else:
        inner[last] = value
    with pytest.raises(Undescribed, match=place):
        described(template)
    assert family_of("<tool_call>", reads_tools=True, response=template).name == "hermes"
    (note,) = response_notes(template)
    assert note.startswith("response_template.")


def test_what_it_leaves_out_the_chat_template_tells() -> None:
    template: Any = deepcopy(JSON)
    del template["fields"]["tool_calls"]
    family = family_of("<tool_call>", reads_tools=True, response=template)
    span = Span("<ponder>", "</ponder>")
    assert family == ToolFamily("hermes", family_of("<tool_call>", reads_tools=True).calls, span)
    unread = family_of("", reads_tools=False, response=JSON)
    assert unread.name == "json"
    assert unread.reasoning == span


def test_it_is_read_of_the_checkpoint(tmp_path: Path) -> None:
    file = tmp_path / "tokenizer_config.json"
    file.write_text(json.dumps({"chat_template": "{{ tools }}", "response_template": JSON}))
    assert ChatTemplate.from_folder(tmp_path).response == JSON
    file.write_text("{}")
    assert ChatTemplate.from_folder(tmp_path).response is None
    file.write_text('{"response_template": 3}')
    with pytest.raises(ModelLoadError, match="must be an object"):
        ChatTemplate.from_folder(tmp_path)


class DescribedModel(FakeModel):
    """Its answers are drawn as JSON's description says."""

    def load(self, config: EngineConfig, progress: Any = None) -> Loaded:
        loaded = super().load(config, progress)
        source = "{% for m in messages %}{{ m.content }}{% endfor %}{{ tools }}"
        template = ChatTemplate(source, shield=loaded.tokenizer.shield, response=NAMED)
        return replace(loaded, template=template)


def test_an_engine_follows_it() -> None:
    cities = {"type": "object", "properties": {"city": {"enum": ["Rome", "Oslo"]}}}
    closed = {**cities, "required": ["city"], "additionalProperties": False}
    tool = {"name": "weather", "parameters": closed}
    with SyncEngine(DescribedModel()) as engine:
        assert engine.model.tool_format == "response_template"
        done = engine.generate(
            [{"role": "user", "content": "Rome?"}],
            tools=[tool],
            tool_choice="required",
            parallel_tool_calls=False,
            max_tokens=200,
            seed=1,
        )
        (call,) = done.tool_calls
        assert call.name == "weather"
        assert call.parsed["city"] in ("Rome", "Oslo")
        assert done.text == ""
