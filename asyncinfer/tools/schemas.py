"""Schemas as grammars can be held to them, and those of tools without what no grammar can."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping
from typing import Any, Final

__all__ = ["is_exact", "loosened", "restated", "with_known_formats"]

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
#: Keywords with values by which they say nothing: all that they look at fits.
_ALL_FIT: Final[tuple[tuple[str, Any], ...]] = (
    ("uniqueItems", False),
    ("propertyNames", True),
    ("propertyNames", {}),
    ("propertyNames", {"type": "string"}),
    ("format", "binary"),
    ("format", "password"),
    ("format", "path"),
)
#: Dates and times that programs can read, in place of the library's formats: these let by a year 0,
#: a 29 February of any year, and seconds of 60.
_YEAR: Final = "(?:000[1-9]|00[1-9][0-9]|0[1-9][0-9]{2}|[1-9][0-9]{3})"
_LEAP_YEAR: Final = (
    "(?:[0-9]{2}(?:0[48]|[2468][048]|[13579][26])|(?:0[48]|[2468][048]|[13579][26])00)"
)
_MONTHS: Final = (
    "(?:(?:0[1-9]|1[0-2])-(?:0[1-9]|1[0-9]|2[0-8])"
    "|(?:0[13-9]|1[0-2])-(?:29|30)|(?:0[13578]|1[02])-31)"
)
_DATE: Final = f"(?:{_YEAR}-{_MONTHS}|{_LEAP_YEAR}-02-29)"
_HOUR: Final = "(?:[01][0-9]|2[0-3]):[0-5][0-9]"
_TIME: Final = rf"{_HOUR}:[0-5][0-9](?:\.[0-9]+)?(?:[Zz]|[+-]{_HOUR})"
_PATTERNS: Final = {
    "date": f"^{_DATE}$",
    "date-time": f"^{_DATE}[Tt]{_TIME}$",
    "time": f"^{_TIME}$",
}
#: With this the texts of a `Decimal` begin in schemas of pydantic 2.12 and 2.13. The library knows
#: no look-ahead, and this one says that some character is none of these.
_DECIMAL: Final = "^(?!^[-+.]*$)"
_DIGIT: Final = {"pattern": "[^-+.]"}
#: One of a `Decimal` with `max_digits` and `decimal_places`, whose other digits are counted, too.
_AHEAD: Final = re.compile(r"\(\?=\[\\d\.\]\{1,\d+\}0\*\$\)(?=\\d\{0,[1-9])")
#: A class of a regular expression, and what JSON Schema has for characters in it and the library
#: for operators.
_CLASS: Final = re.compile(r"\\.|\[\^?\]?(?:[^\]\\]|\\.)*\]", re.DOTALL)
_OPERATOR: Final = re.compile(r"(\\.)|[\[&~]", re.DOTALL)
#: Keywords of counts, which may be written as floats.
_COUNTS: Final = tuple(
    f"{bound}{what}" for bound in ("min", "max") for what in ("Items", "Length", "Properties")
)
#: Bounds, the exclusive ones second, and in which direction numbers are within.
_BOUNDS: Final = (("minimum", "exclusiveMinimum", 1), ("maximum", "exclusiveMaximum", -1))
#: The library's bounds are floats, and integers of 64 bits. Up to the first number each integer is
#: a float; the second one is the largest that is both.
_EXACT: Final = 1 << 53
_LARGEST: Final = (1 << 63) - (1 << 10)


def with_known_formats(schema: Mapping[str, Any]) -> dict[str, Any]:
    """The schema of a tool, `restated`, without formats that grammars do not know, such as
    pydantic's "path", and without values that are not `is_exact`."""

    def known(one: Mapping[str, Any]) -> dict[str, Any]:
        kept = {key: one[key] for key in one if key != "format" or str(one[key]) in _FORMATS}
        return {k: kept[k] for k in kept if k not in ("const", "enum") or is_exact(kept[k])}

    return restated(_changed(schema, known))


def is_exact(value: Any) -> bool:
    """Whether a grammar writes the value as it is: the library makes floats of its numbers."""
    if isinstance(value, Mapping):
        return all(map(is_exact, value.values()))
    if isinstance(value, list):
        return all(map(is_exact, value))
    return not isinstance(value, int) or abs(value) <= _EXACT or int(float(value)) == value


def restated(schema: Mapping[str, Any]) -> dict[str, Any]:
    """The schema as the library can be held to it: without keywords that say nothing, with names of
    properties that are listed as properties, with dates and times that are some, and with bounds
    that the library can compute with. Others are moved inwards to the next number that is both a
    float and of 64 bits."""

    def plain(one: Mapping[str, Any]) -> dict[str, Any]:
        kept = {key: one[key] for key in one if (key, one[key]) not in _ALL_FIT}
        names = _listed(schema, kept.get("propertyNames"))
        if names is not None and kept.keys().isdisjoint(("properties", "patternProperties")):
            # A dict whose keys are an Enum or a Literal.
            del kept["propertyNames"]
            kept["properties"] = dict.fromkeys(names, kept.get("additionalProperties", True))
            kept["additionalProperties"] = False
        if isinstance(text := kept.get("pattern"), str):
            kept["pattern"] = _with_plain_classes(text)
        if isinstance(named := kept.get("patternProperties"), Mapping):
            kept["patternProperties"] = {_with_plain_classes(key): named[key] for key in named}
        beside = []
        if (pattern := _PATTERNS.get(str(kept.get("format")))) is not None:
            del kept["format"]
            if kept.setdefault("pattern", pattern) != pattern:
                beside = [{"pattern": pattern}]
        if isinstance(text := kept.get("pattern"), str) and text.startswith(_DECIMAL):
            # One of its alternatives lacks the end that it means.
            kept["pattern"] = f"^{_AHEAD.sub('', text.removeprefix(_DECIMAL)).replace('$', '')}$"
            beside = [*beside, _DIGIT]
        if beside and isinstance(others := kept.get("allOf", []), list):
            kept["allOf"] = [*others, *(each for each in beside if each not in others)]
        for name in _COUNTS:
            if isinstance(count := kept.get(name), float) and count.is_integer():
                kept[name] = int(count)
        for name, exclusive, inwards in _BOUNDS:
            if _is_large(kept.get(name)):
                kept[name] = _moved(kept[name], inwards, False)
            if _is_large(kept.get(exclusive)):
                moved = _moved(kept.pop(exclusive), inwards, True)
                both = (moved, kept.get(name, moved))
                kept[name] = max(both) if inwards > 0 else min(both)
        return kept

    return _changed(schema, plain)


def _with_plain_classes(pattern: str) -> str:
    """A regular expression without what the library takes for a class within a class."""

    def plain(found: re.Match[str]) -> str:
        at = 2 if found[0].startswith(("[^", "\\")) else 1
        inner = found[0][at:]
        return found[0][:at] + _OPERATOR.sub(lambda one: one[1] or f"\\{one[0]}", inner)

    return _CLASS.sub(plain, pattern)


def _listed(root: Mapping[str, Any], names: Any) -> list[str] | None:
    """The texts that a schema lists; None where it says otherwise what fits it."""
    match root, names:
        case {"$defs": {**shared}}, {"$ref": str(target)} if len(names) == 1:
            names = shared.get(target.removeprefix("#/$defs/"))
    match names:
        case {"enum": [*listed], **others} | {"const": listed, **others}:
            texts = listed if isinstance(listed, list) else [listed]
            known = others.keys() <= {"description", "title", "type"}
            if known and others.get("type", "string") == "string":
                return [text for text in texts if isinstance(text, str)]
    return None


def _is_large(value: Any) -> bool:
    return isinstance(value, int | float) and abs(value) >= _EXACT


def _moved(bound: float, inwards: int, exclusive: bool) -> int:
    """An inclusive bound in place of a large one."""
    near = float(bound)
    if near * inwards < bound * inwards or (exclusive and near == bound):
        near = math.nextafter(near, inwards * math.inf)
    return inwards * int(min(max(inwards * near, -_LARGEST), 2 * _LARGEST))


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
