"""Schemas of arguments that are written by themselves: whatever one says, it is held or refused."""

from __future__ import annotations

import re
from typing import Any

import pytest
from tool_transcripts import SYNTAXES, Reading, family_named, tokenizer_of

from asyncinfer.errors import InvalidRequest
from asyncinfer.grammar import GrammarCompiler
from asyncinfer.tools import argument_types
from asyncinfer.tools.argument_types import types_of
from asyncinfer.tools.tool import check_tools

#: Families that write each argument by itself.
APART = ("qwen-xml", "glm", "gemma", "llama-python")
TEXT = {"type": "string"}
#: What no schema is, or what calls cannot be held to.
ODD: tuple[dict[str, Any], ...] = (
    {"required": 5},
    {"required": None},
    {"required": "a", "properties": {"a": TEXT}},
    {"required": [["a"]], "properties": {"a": TEXT}},
    {"properties": {"a": {**TEXT, "enum": 5}}},
    {"properties": {"a": {**TEXT, "enum": []}}},
    {"properties": {"a": {**TEXT, "minLength": "x"}}},
    {"properties": {"a": {**TEXT, "maxLength": [3]}}},
    {"properties": {"a": {"$ref": []}}},
    {"properties": {"a": {"type": "object", "properties": []}}},
    {"properties": {"a": {"anyOf": [{"$ref": "#/properties/a"}, TEXT]}}},
    {"properties": {"a": 5}},
    {"properties": {"a": True}},
)


def chained(count: int, times: int) -> dict[str, Any]:
    """Definitions of which each names the next one several times."""
    named = {f"d{at}": {"anyOf": [{"$ref": f"#/$defs/d{at + 1}"}] * times} for at in range(count)}
    return {"$defs": {**named, f"d{count}": TEXT}, "properties": {"a": {"$ref": "#/$defs/d0"}}}


@pytest.mark.parametrize("schema", ODD, ids=str)
@pytest.mark.parametrize("name", APART)
def test_an_odd_schema_is_held_or_refused(name: str, schema: dict[str, Any]) -> None:
    tools = check_tools([{"name": "f", "parameters": schema}])
    for must_call in (False, True):
        reading = Reading(
            family_named(name), tokenizer_of(SYNTAXES[name]), tools, must_call=must_call
        )
        refused = None
        try:
            reading.reader.grammar()
        except InvalidRequest as error:
            refused = error
        assert refused is None or (must_call and refused.field.startswith("tools/f"))
        text = SYNTAXES[name].write((("f", {"a": "x"}),))
        assert [call[1] for call in reading.parse(reading.marked(text))[2]] == ["f"]


@pytest.mark.parametrize("properties", [[], "x", None, 5])
def test_properties_have_names(properties: Any) -> None:
    with pytest.raises(InvalidRequest, match=r"^tools\[0\].parameters/properties=.*an object"):
        check_tools([{"name": "f", "parameters": {"properties": properties}}])


def test_a_schema_is_looked_at_once_however_often_it_is_referred_to(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Sixty steps of two references each would be looked at for ever."""
    looks = 0
    resolved = argument_types.resolved

    def counted(schema: Any, root: Any) -> Any:
        nonlocal looks
        looks += 1
        assert looks < 1000
        return resolved(schema, root)

    monkeypatch.setattr(argument_types, "resolved", counted)
    root = chained(60, 2)
    assert types_of(root["properties"]["a"], root) == {"string"}
    many = {"anyOf": [TEXT] * 5000}
    assert types_of(many, many) is None


def test_a_schema_that_refers_on_and_on_is_refused() -> None:
    """Each step takes frames of the interpreter, of which there are a thousand."""
    tools = check_tools([{"name": "f", "parameters": chained(500, 1)}])
    reading = Reading(family_named("gemma"), tokenizer_of(SYNTAXES["gemma"]), tools, must_call=True)
    with pytest.raises(InvalidRequest, match="more than 100 levels"):
        reading.reader.grammar()


@pytest.mark.parametrize("name", SYNTAXES)
def test_properties_of_one_schema_have_rules_of_their_own(name: str) -> None:
    """No rule has two definitions: a grammar that has one is refused."""
    node = {"type": "object", "properties": {at: {"$ref": "#/$defs/node"} for at in ("a", "b")}}
    shared = {"$ref": "#/$defs/text"}
    schema = {
        "type": "object",
        "$defs": {"node": node, "text": TEXT},
        "properties": {"x": shared, "y": shared, "z": {"$ref": "#/$defs/node"}},
        "required": ["x", "y"],
    }
    tools = check_tools([{"name": "f", "parameters": schema}])
    reading = Reading(family_named(name), tokenizer_of(SYNTAXES[name]), tools, must_call=True)
    form = reading.reader.grammar()
    assert form is not None
    rules = [line.split(":")[0] for line in form.text.splitlines() if re.match(r"\w+\s*:", line)]
    assert sorted(rules) == sorted(set(rules))
    assert len(rules) > 1 or form.kind == "json_schema"


SMALL = {"type": "integer", "minimum": 0, "maximum": 9}
LEAF = {"type": "object", "properties": {"up": {"$ref": "#"}}, "additionalProperties": False}


@pytest.mark.parametrize("name", SYNTAXES)
@pytest.mark.parametrize(
    ("properties", "good", "bad"),
    [
        ({"t": {"type": "array", "items": {"$ref": "#"}}}, {"t": [{"t": []}, {}]}, {"t": [[]]}),
        ({"t": {"type": "array", "items": {"$ref": "#/properties/n"}}}, {"t": [1]}, {"t": ["x"]}),
        ({"t": {"$ref": "#/$defs/leaf"}}, {"t": {"up": {"t": {}}}}, {"t": {"up": 1}}),
        ({"t": {"$ref": "#/$defs/a~1b"}}, {"t": 3}, {"t": 33}),
        ({"t": {"anyOf": [{"$ref": "#/properties/n"}, {"type": "null"}]}}, {"t": 4}, {"t": 11}),
        ({"t": False}, {"n": 1}, {"t": 1}),
    ],
)
def test_an_argument_may_refer_to_any_part(
    name: str, properties: dict[str, Any], good: dict[str, Any], bad: dict[str, Any]
) -> None:
    """What refers to another argument or to all of them was refused, or held to itself."""
    named = {"leaf": LEAF, "a/b": SMALL, "root0": TEXT}
    schema = {
        "$defs": named,
        "properties": {**properties, "n": SMALL},
        "additionalProperties": False,
    }
    tools = check_tools([{"name": "f", "parameters": schema}])
    syntax = SYNTAXES[name]
    tokenizer = tokenizer_of(syntax)
    reading = Reading(family_named(name), tokenizer, tools, must_call=True)
    form = reading.reader.grammar()
    assert form is not None
    (start,) = GrammarCompiler(tokenizer, tokenizer.vocab_size).matchers(form, 1, 0)
    for arguments, fits in ((good, True), (bad, False)):
        # A restricted answer writes JSON where Python has other quotes.
        text = syntax.write((("f", arguments),)).replace("'", '"')
        ids = tokenizer.encode(text, add_special_tokens=False)
        assert (start.fitting(ids) == len(ids)) == fits


@pytest.mark.parametrize(
    ("name", "key"),
    [
        *(("qwen-xml", key) for key in ("a>b", "</parameter>", " a", "a\nb")),
        *(("glm", key) for key in ("</arg_key>", "a\nb")),
        *(("gemma", key) for key in ("a:b", "a,b", "{", "a ")),
        *(("llama-python", key) for key in ("a=b", "a b")),
    ],
)
def test_a_name_that_would_be_read_as_another_is_refused(name: str, key: str) -> None:
    tools = check_tools([{"name": "f", "parameters": {"properties": {key: TEXT}}}])
    tokenizer = tokenizer_of(SYNTAXES[name])
    reading = Reading(family_named(name), tokenizer, tools, must_call=True)
    with pytest.raises(InvalidRequest, match=r"^tools/f/properties="):
        reading.reader.grammar()
    # A name of letters is none.
    plain = check_tools([{"name": "f", "parameters": {"properties": {"a_b": TEXT}}}])
    assert Reading(family_named(name), tokenizer, plain, must_call=True).reader.grammar()
