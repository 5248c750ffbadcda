"""The types of arguments by their tool's schema, for syntaxes that write text without quotes."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping
from typing import Any, Final

from asyncinfer.tools.lark import Unheld, escaped, json_rule, lazily

__all__ = ["arguments_of", "as_json", "is_text", "resolved", "text_rule", "types_of", "value_rule"]

#: Keywords of an object's schema that hold where each argument is written by itself.
_OBJECT_KEYS: Final = frozenset(
    [
        *("type", "properties", "required", "additionalProperties", "description", "title"),
        *("$schema", "$defs", "definitions", "examples", "strict"),
    ]
)

#: Keywords of a schema that a text without quotes can be held to.
_TEXT_KEYS: Final = frozenset(
    [
        *("type", "description", "title", "default", "examples", "enum", "const"),
        *("minLength", "maxLength", "format"),
    ]
)
#: Keywords whose schemas others refer to, and references to other parts.
_SHARED: Final = ("$defs", "definitions")
_ROOTED: Final = re.compile(r"#(?!/\$defs/|/definitions/)")
#: Schemas that are looked at for the types that one of them names.
_MOST_PARTS: Final = 256
#: Characters of a text that a grammar counts: its states grow with them.
_MOST_COUNTED: Final = 1_000
_KINDS: Final = {
    bool: "boolean",
    int: "integer",
    float: "number",
    list: "array",
    dict: "object",
    type(None): "null",
}


def resolved(schema: Any, root: Mapping[str, Any]) -> Mapping[str, Any]:
    """A schema, or the one of `root` that it refers to."""
    for _ in range(16):
        target = schema.get("$ref") if isinstance(schema, Mapping) else None
        if not isinstance(target, str) or not (target == "#" or target.startswith("#/")):
            break
        found: Any = root
        for name in target.split("/")[1:]:
            key = name.replace("~1", "/").replace("~0", "~")
            found = found.get(key) if isinstance(found, Mapping) else None
        schema = found
    return schema if isinstance(schema, Mapping) else {}


def types_of(schema: Any, root: Mapping[str, Any]) -> frozenset[str] | None:
    """The JSON types that a schema names; None where it names none."""
    found: set[str] = set()
    parts, seen = [schema], set[int]()
    for part in parts:
        one = resolved(part, root)
        if id(one) in seen:
            # It refers to itself, or to another one several times.
            continue
        seen.add(id(one))
        named, inner = one.get("type"), one.get("anyOf") or one.get("oneOf")
        values = one.get("enum", [one["const"]] if "const" in one else None)
        if isinstance(named, str | list):
            kinds = [named] if isinstance(named, str) else named
            found.update(kind for kind in kinds if isinstance(kind, str))
        elif isinstance(values, list):
            found.update(_KINDS.get(type(value), "string") for value in values)
        elif isinstance(inner, list) and len(parts) + len(inner) <= _MOST_PARTS:
            parts += inner
        else:
            return None
    return frozenset(found)


def is_text(schema: Any, root: Mapping[str, Any]) -> bool:
    """Whether the schema allows a string and nothing else."""
    return types_of(schema, root) == frozenset(["string"])


def as_json(text: str, kinds: frozenset[str] | None) -> str:
    """The JSON of a value that may be more than a text: as it is written where it is JSON of one of
    `kinds` (None: of any type), else a string."""
    bare = text.strip()
    try:
        # JSON has no NaN and no infinities, and `int` refuses them.
        value = json.loads(bare, parse_constant=int)
    except (ValueError, RecursionError):
        # Some models write them as Python does.
        named = {"True": "true", "False": "false", "None": "null"}.get(bare)
        kind = "null" if bare == "None" else "boolean"
        if named is not None and (kinds is None or kind in kinds):
            return named
        return json.dumps(text, ensure_ascii=False)
    kind = _KINDS.get(type(value), "string")
    fits = kinds is None or kind in kinds or (kind == "integer" and "number" in kinds)
    return bare if fits else json.dumps(text, ensure_ascii=False)


def arguments_of(
    place: str, schema: Mapping[str, Any], syntax: Iterable[str]
) -> list[tuple[str, Any, bool]]:
    """Name and schema of each property of an object, and whether it is required. Raises `Unheld`
    for a schema that says more, and for a name with a text of the `syntax`, by which calls would be
    read as others."""
    named, required = schema.get("properties", {}), schema.get("required", [])
    held = isinstance(named, Mapping) and isinstance(required, list)
    if not held or not all(isinstance(key, str) and key in named for key in required):
        raise Unheld(f"{place}/required", repr(required)[:80])
    for key in schema.keys() - _OBJECT_KEYS:
        raise Unheld(f"{place}/{key}", repr(schema[key])[:80])
    parts = [each for each in syntax if each]
    for key in named:
        if not isinstance(key, str) or key != key.strip() or any(each in key for each in parts):
            raise Unheld(f"{place}/properties", repr(key)[:80])
    wanted = frozenset(required)
    # What is false may not be there.
    told = ((key, each) for key, each in named.items() if each is not False or key in wanted)
    return [(key, each, key in wanted) for key, each in told]


def value_rule(name: str, schema: Any, root: Mapping[str, Any]) -> str:
    """A rule for JSON that fits a schema, which may refer to parts of `root`."""
    held = schema if isinstance(schema, Mapping) else {"enum": []} if schema is False else {}
    shared = {key: root[key] for key in _SHARED if key in root}
    whole = {**held, **shared}
    named = shared.get("$defs", {})
    if isinstance(named, Mapping):
        # By itself the value is the root of what it refers to, so the other root is a part of it.
        own = next(f"root{at}" for at in range(len(named) + 1) if f"root{at}" not in named)
        moved = _moved(whole, f"#/$defs/{own}")
        if moved != whole:
            whole = {
                **moved,
                "$defs": {**moved.get("$defs", {}), own: _moved(root, f"#/$defs/{own}")},
            }
    return json_rule(name, whole)


def _moved(value: Any, to: str) -> Any:
    """A schema whose references to the root, or a part of it that is not shared, are to `to`."""
    if isinstance(value, list):
        return [_moved(one, to) for one in value]
    if not isinstance(value, Mapping):
        return value
    found = {key: _moved(one, to) for key, one in value.items()}
    target = found.get("$ref")
    if isinstance(target, str) and _ROOTED.match(target):
        found["$ref"] = to + target[1:]
    return found


def text_rule(name: str, schema: Mapping[str, Any], end: str, place: str) -> str:
    """A rule for a text that fits a schema, up to `end`, which is part of it. An empty `end` stands
    for a token that follows. Raises `Unheld` for what only JSON can be held to."""
    for key in schema.keys() - _TEXT_KEYS:
        raise Unheld(f"{place}/{key}", repr(schema[key])[:80])
    values = schema.get("enum", [schema["const"]] if "const" in schema else None)
    if isinstance(values, list) and values:
        return f"{name}: " + " | ".join(json.dumps(f"{value}{end}") for value in values)
    low, high = schema.get("minLength", 0), schema.get("maxLength", "")
    numbers = type(low) is int and (high == "" or type(high) is int)
    if values is not None or not numbers or max(low, high or 0) > _MOST_COUNTED:
        raise Unheld(place, repr(dict(schema))[:80])
    upper = f"{name.upper()}_TEXT"
    if not end:
        some = "" if low else "?"
        return f"{name}: {upper}{some}\n{upper}: /(.|\\n){{{max(low, 1)},{high}}}/"
    if (low, high) == (0, ""):
        return lazily(name, end)
    # The text ends at the first `end`.
    body, later = f"(.|\\n){{{low},{high}}}{escaped(end)}", f"(.|\\n)*{escaped(end)}(.|\\n)+"
    return f"{name}[lazy]: {upper} & ~{upper}_ON\n{upper}: /{body}/\n{upper}_ON: /{later}/"
