"""Options for structured output: their checks, and what an answer has to fit as one text."""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping
from typing import Any, Final, NamedTuple

from asyncinfer.bounds import (
    MAX_CHOICE_CHARS,
    MAX_CHOICES,
    MAX_CLOSING_CHARS,
    MAX_GRAMMAR_CHARS,
    MAX_SCHEMA_DEPTH,
    MAX_SCHEMA_VALUES,
)
from asyncinfer.checks import check_boolean, check_string, check_strings
from asyncinfer.errors import InvalidRequest, Size

__all__ = [
    "CONSTRAINTS",
    "AnswerFormat",
    "AnswerReader",
    "check_closing",
    "check_constraints",
    "is_typed",
    "json_object_text",
    "partial_json",
    "schema_of",
]

#: The options of which a request names one at most.
CONSTRAINTS: Final = ("json_schema", "json_object", "regex", "grammar", "choice", "structural_tag")


class AnswerFormat(NamedTuple):
    """What an answer has to fit. Equal formats are compiled once."""

    #: The option's name; "json_object" is a "json_schema", and "tools" has Lark's syntax.
    kind: str
    #: A JSON Schema, a regular expression, a grammar, or JSON of the choices or the tags.
    text: str
    #: The text after which it holds; empty where it holds from the start.
    after: str = ""
    #: Rules in Lark's syntax of `before`, what may come first; empty for nothing.
    before: str = ""
    #: Tokens, beside the special ones, that are no text to the grammar.
    tokens: frozenset[int] = frozenset()


def check_constraints(given: Mapping[str, Any]) -> dict[str, Any]:
    """Check the options in `CONSTRAINTS` and return those that are set, as `SamplingParams` keeps
    them. Raises `InvalidRequest`."""
    named = [name for name in CONSTRAINTS if given[name] is not None]
    if given["json_object"] is False:
        named.remove("json_object")
    if len(named) > 1:
        raise InvalidRequest(
            named[1], Size(f"beside {named[0]}"), f"one at most of {', '.join(CONSTRAINTS)}"
        )
    kept: dict[str, Any] = {}
    for name in named:
        kept[name] = value = given[name]
        match name:
            case "json_object":
                check_boolean(name, value)
            case "json_schema" if not is_typed(value):
                kept[name] = json_object_text(name, value)
                _check_schema(name, json.loads(kept[name]))
            case "structural_tag":
                kept[name] = json_object_text(name, value)
                _check_tags(json.loads(kept[name]))
            case "regex" | "grammar":
                kept[name] = _text(name, value)
            case "choice":
                if isinstance(value, str):
                    raise InvalidRequest(name, value, "must be a list of strings")
                kept[name] = check_strings(name, value, MAX_CHOICES, MAX_CHOICE_CHARS)
                if not kept[name]:
                    raise InvalidRequest(name, value, "must name at least one string")
                _check_size(name, sum(map(len, kept[name])))
    return kept


def check_closing(name: str, value: object, constrained: bool) -> str | None:
    """Check the text after which a constraint holds. Raises `InvalidRequest`."""
    if value is None:
        return None
    text = check_string(name, value, MAX_CLOSING_CHARS, least=1)
    if not constrained:
        raise InvalidRequest(name, value, f"needs one of {', '.join(CONSTRAINTS)}")
    return _text(name, text)


def is_typed(schema: object) -> bool:
    """Whether it is a pydantic model or a `TypeAdapter`, which has a schema and reads JSON."""
    if isinstance(schema, type):
        return callable(getattr(schema, "model_json_schema", None))
    return callable(getattr(schema, "json_schema", None)) and callable(
        getattr(schema, "validate_json", None)
    )


def schema_of(typed: Any) -> str:
    """The JSON Schema of a pydantic model or a `TypeAdapter`. Takes milliseconds.

    Raises `InvalidRequest` where the type has none.
    """
    made: Any = typed
    try:
        schema = made.model_json_schema() if isinstance(typed, type) else made.json_schema()
    except Exception as error:
        raise InvalidRequest("json_schema", typed, f"has no JSON Schema: {error}") from error
    text = json_object_text("json_schema", schema)
    _check_schema("json_schema", json.loads(text))
    return text


def json_object_text(name: str, value: Any) -> str:
    """JSON text of an object, or of a JSON text of one, after its size and depth are checked.
    Raises `InvalidRequest`."""
    if isinstance(value, str):
        text = _text(name, value)
        try:
            value = json.loads(text)
        except (ValueError, RecursionError) as error:
            raise InvalidRequest(name, text, f"is no JSON: {error}") from None
    if not isinstance(value, Mapping):
        typed = ", or a pydantic model or TypeAdapter" * (name == "json_schema")
        raise InvalidRequest(name, value, f"must be a JSON object, as a dict or a string{typed}")
    _check_values(name, value)
    try:
        text = json.dumps(value, ensure_ascii=False, default=dict)
    except (TypeError, ValueError) as error:
        raise InvalidRequest(name, value, f"is no JSON: {error}") from None
    return _text(name, text)


class AnswerReader(NamedTuple):
    """Makes objects of answers that are JSON, whole ones and unfinished ones."""

    #: What the request named; None for `json_object`.
    schema: Any
    #: The text before the JSON ends with this; empty where there is none.
    after: str

    def whole(self, text: str) -> Any:
        """The object of a complete answer; None if its JSON was cut short."""
        text, adapter = self._json(text), self.schema
        try:
            plain = json.loads(text)
        except (ValueError, RecursionError):
            return None
        if adapter is None or isinstance(adapter, str):
            return plain
        if isinstance(adapter, type):
            return adapter.model_validate_json(text)  # type: ignore[attr-defined]
        return adapter.validate_json(text)

    def partial(self, text: str) -> Any:
        """See `partial_json`."""
        return partial_json(self._json(text))

    def _json(self, text: str) -> str:
        return text.partition(self.after)[2] if self.after else text


def partial_json(text: str) -> Any:
    """The value of JSON whose end is missing, as plain data; None where nothing can be read yet.

    Raises `ModuleNotFoundError` without pydantic, naming what to install.
    """
    try:
        from pydantic_core import from_json
    except ModuleNotFoundError as error:
        raise ModuleNotFoundError(
            'Chunk.partial needs pydantic: pip install "asyncinfer[pydantic]"', name=error.name
        ) from None
    try:
        return from_json(text, allow_partial="trailing-strings")
    except ValueError:
        return None


def _check_size(name: str, chars: int) -> None:
    if chars > MAX_GRAMMAR_CHARS:
        bound = f"at most {MAX_GRAMMAR_CHARS} characters"
        raise InvalidRequest(name, Size(f"{chars} characters"), bound)


def _text(name: str, value: object) -> str:
    if not isinstance(value, str) or not value:
        raise InvalidRequest(name, value, "must be a non-empty string")
    _check_size(name, len(value))
    try:
        value.encode()
    except UnicodeEncodeError:
        raise InvalidRequest(name, value, "a lone surrogate is no text") from None
    return value


def _check_values(name: str, value: Mapping[Any, Any]) -> None:
    """Bound the work that anything else does with a value."""
    values = chars = 0
    waiting: list[tuple[Any, str, int]] = [(value, name, 0)]
    while waiting:
        item, place, depth = waiting.pop()
        values += 1
        if depth > MAX_SCHEMA_DEPTH:
            bound = f"at most {MAX_SCHEMA_DEPTH} levels of nesting"
            raise InvalidRequest(place[:200], Size(f"{depth} levels or more"), bound)
        if values + len(waiting) > MAX_SCHEMA_VALUES:
            bound = f"at most {MAX_SCHEMA_VALUES} values"
            raise InvalidRequest(name, Size(f"{values + len(waiting)} values or more"), bound)
        if isinstance(item, str):
            chars += len(item)
        elif isinstance(item, Mapping):
            for key, entry in item.items():
                if not isinstance(key, str):
                    raise InvalidRequest(place, key, "keys must be strings")
                chars += len(key)
                waiting.append((entry, f"{place}/{_escape(key)}", depth + 1))
        elif isinstance(item, list | tuple):
            if len(item) > MAX_SCHEMA_VALUES:
                bound = f"at most {MAX_SCHEMA_VALUES} values"
                raise InvalidRequest(place, Size(f"{len(item)} entries"), bound)
            # A path for each entry of a large enum would take more time than the check.
            waiting += [(entry, f"{place}/*", depth + 1) for entry in item]
        elif item is not None and not isinstance(item, bool | int | float):
            raise InvalidRequest(place, item, "is no JSON value")
        elif isinstance(item, int | float) and not abs(item) <= sys.float_info.max:
            raise InvalidRequest(place, Size("a number"), "must be a finite float of 64 bits")
        _check_size(name, chars)


def _escape(key: str) -> str:
    """A key as a JSON pointer (RFC 6901) writes it."""
    return key[:80].replace("~", "~0").replace("/", "~1")


def _check_names(place: str, given: Mapping[str, Any], known: tuple[str, ...]) -> None:
    for name in given:
        if name not in known:
            bound = f"is not known; {', '.join(known)} are"
            raise InvalidRequest(f"{place}/{_escape(name)}", given[name], bound)


def _check_schema(name: str, schema: Mapping[str, Any]) -> None:
    """What a schema may not say of the way it is compiled."""
    if "x-guidance" in schema:
        raise InvalidRequest(f"{name}/x-guidance", Size("an object"), "is not an option")


def _check_tags(tag: Any) -> None:
    """The form is `{"structures": [{"begin", "schema", "end"}], "triggers": [...]}`."""
    name = "structural_tag"
    _check_names(name, tag, ("structures", "triggers", "type"))
    structures, triggers = tag.get("structures"), tag.get("triggers")
    if not isinstance(structures, list) or not structures:
        raise InvalidRequest(f"{name}/structures", structures, "must be a list of objects")
    if not isinstance(triggers, list) or not all(isinstance(t, str) and t for t in triggers):
        raise InvalidRequest(f"{name}/triggers", triggers, "must be non-empty strings")
    for index, one in enumerate(structures):
        place = f"{name}/structures/{index}"
        if not isinstance(one, dict) or not isinstance(one.get("begin"), str):
            raise InvalidRequest(place, one, "must have a string `begin`")
        _check_names(place, one, ("begin", "schema", "end"))
        check_string(f"{place}/end", one.get("end", ""))
        if not isinstance(one.get("schema"), dict):
            raise InvalidRequest(f"{place}/schema", one.get("schema"), "must be a JSON Schema")
        _check_schema(f"{place}/schema", one["schema"])
        if not any(one["begin"].startswith(trigger) for trigger in triggers):
            bound = f"must start with one of the triggers {triggers}"
            raise InvalidRequest(f"{place}/begin", one["begin"], bound)
