"""Schemas of tools, without what no grammar of calls can be held to."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Final

__all__ = ["loosened", "with_known_formats"]

#: Formats of texts that grammars know. All others are notes, as JSON Schema allows.
_FORMATS: Final = frozenset(
    [
        *("date", "date-time", "duration", "email", "hostname", "ipv4", "ipv6", "time", "uri"),
        *("unknown", "uuid"),
    ]
)
#: Keywords of JSON Schema that no grammar is held to, or not to all of their values.
_UNHELD: Final = frozenset(
    [
        *("contains", "dependencies", "dependentRequired", "dependentSchemas", "else", "if"),
        *("maxContains", "minContains", "not", "pattern", "propertyNames", "then"),
        *("unevaluatedItems", "unevaluatedProperties", "uniqueItems"),
    ]
)
#: Keywords whose values are schemas by names of the caller's choice.
_NAMED: Final = frozenset(["$defs", "definitions", "patternProperties", "properties"])
#: Keywords whose values are no schemas.
_VALUES: Final = frozenset(["const", "default", "enum", "examples"])


def with_known_formats(schema: Mapping[str, Any]) -> dict[str, Any]:
    """The schema without formats that grammars do not know, such as pydantic's "path"."""

    def known(one: Mapping[str, Any]) -> dict[str, Any]:
        return {key: one[key] for key in one if key != "format" or str(one[key]) in _FORMATS}

    return _changed(schema, known)


def loosened(schema: Mapping[str, Any]) -> dict[str, Any]:
    """A schema that allows all that `schema` does, and more where a grammar may not be held to
    it."""

    def loose(one: Mapping[str, Any]) -> dict[str, Any]:
        kept = {key: one[key] for key in one if key not in _UNHELD}
        if "oneOf" in kept:
            # One of them at least, in place of exactly one.
            kept.setdefault("anyOf", kept.pop("oneOf"))
        return kept

    return _changed(schema, loose)


def _changed(
    schema: Mapping[str, Any], change: Callable[[Mapping[str, Any]], dict[str, Any]]
) -> dict[str, Any]:
    """The schema after `change` of it and of all schemas within."""

    def within(key: str, value: Any) -> Any:
        if key in _VALUES:
            return value
        if isinstance(value, Mapping):
            if key in _NAMED:
                return {name: within("", each) for name, each in value.items()}
            return _changed(value, change)
        if isinstance(value, list):
            return [within("", each) for each in value]
        return value

    return {key: within(key, value) for key, value in change(schema).items()}
