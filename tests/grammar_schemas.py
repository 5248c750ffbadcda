"""JSON Schemas of many kinds, and documents that they allow."""

from __future__ import annotations

import random
from collections.abc import Iterator
from typing import Any, Final

Schema = dict[str, Any]

SHORT: Final[Schema] = {"type": "string", "maxLength": 6}
SCALARS: Final[list[Schema]] = [
    SHORT,
    {"type": "integer", "minimum": -50, "maximum": 5000},
    {"type": "number", "minimum": -1.5, "maximum": 99.25},
    {"type": "boolean"},
    {"type": "null"},
    {"enum": ["red", "green", "größer", "日本", 7, None]},
    {"const": {"a": [1, "zwei", True]}},
]
#: Each with texts that match.
PATTERNS: Final[dict[str, list[str]]] = {
    r"^[a-z]{3}$": ["abc", "zzz"],
    r"^[A-Z][a-z]{1,8}$": ["Ab", "Zebra"],
    r"^\d{3}-\d{4}$": ["123-4567"],
    r"^(foo|bar)(,(foo|bar)){0,3}$": ["foo", "bar,foo,bar"],
    r"^[^\"\\]{1,4}$": ["a b", "é/ü"],
    r"^#[0-9a-f]{6}$": ["#00ffaa"],
    r"^$": [""],
    r"^a?b{2,4}c*d{0,2}$": ["bb", "abbbbccd"],
    r"^[äöü]{1,3}$": ["ä", "öüä"],
    r"^v\d{1,2}\.\d{1,2}$": ["v1.0", "v10.22"],
    r"^\{[a-z]{1,3}\}$": ["{ab}"],
    r"^[a-z]{1,5}\\[a-z]{1,5}$": ["ab\\cd"],
}
FORMATS: Final[dict[str, list[str]]] = {
    "date": ["2024-02-29", "1999-12-31"],
    "time": ["23:59:59Z", "00:00:00.5+01:00"],
    "date-time": ["2024-02-29T12:00:00Z", "1999-01-01T00:00:00.25-05:00"],
    "uuid": ["123e4567-e89b-12d3-a456-426614174000"],
    "ipv4": ["127.0.0.1", "255.0.10.99"],
    "ipv6": ["::1", "2001:db8::ff00:42:8329"],
    "email": ["a.b@example.org"],
    "hostname": ["example.org", "a-b.c"],
    "duration": ["P1DT2H", "P3W"],
    "uri": ["https://example.org/a?b=c#d"],
}


def closed(**properties: Schema) -> Schema:
    """An object with exactly these."""
    return {
        "type": "object",
        "properties": properties,
        "required": [*properties],
        "additionalProperties": False,
    }


def _strings() -> Iterator[Schema]:
    for low in (0, 1, 3):
        for high in (3, 5, 20):
            yield {"type": "string", "minLength": low, "maxLength": high}
    for pattern in PATTERNS:
        yield {"type": "string", "pattern": pattern}
        yield closed(code={"type": "string", "pattern": pattern})
    for name in FORMATS:
        yield {"type": "string", "format": name}
        yield closed(when={"type": "string", "format": name}, n={"type": "integer", "maximum": 9})


def _numbers() -> Iterator[Schema]:
    bounds: list[Schema] = [
        {},
        {"minimum": 0},
        {"maximum": -1},
        {"minimum": 7, "maximum": 7},
        {"minimum": -5, "maximum": 17},
        {"exclusiveMinimum": 0, "exclusiveMaximum": 10},
        {"minimum": 1000, "maximum": 123456},
    ]
    for kind in ("integer", "number"):
        for bound in bounds:
            yield {"type": kind, **bound}
            yield {"type": "array", "items": {"type": kind, **bound}, "maxItems": 3}
    for step in (2, 3, 7, 10, 25):
        yield {"type": "integer", "multipleOf": step, "minimum": 0, "maximum": 1000}


def _enums() -> Iterator[Schema]:
    for size in (1, 2, 17, 300, 2000):
        yield {"enum": [f"value {i}" for i in range(size)]}
        yield {"enum": [*range(size)]}
        yield closed(pick={"enum": [f"{i} größer 日本" for i in range(min(size, 1000))]})
    yield {"enum": [None, True, False, 0, 1.5, "x", [], {}, [1, {"a": "ß"}]]}
    for value in (None, True, 0, -12, 2.5, "", 'é\n"\\', [], [1, [2]], {}, {"a": {"b": [None]}}):
        yield {"const": value}
        yield closed(fixed={"const": value}, free={"type": "boolean"})


def _arrays() -> Iterator[Schema]:
    for item in SCALARS:
        for low, high in ((0, 3), (2, 2), (1, 5)):
            yield {"type": "array", "items": item, "minItems": low, "maxItems": high}
    for count in (1, 2, 3):
        yield {
            "type": "array",
            "prefixItems": SCALARS[:count],
            "items": False,
            "minItems": count,
        }
        yield {
            "type": "array",
            "prefixItems": SCALARS[count : 2 * count],
            "items": {"type": "boolean"},
            "minItems": count,
            "maxItems": count + 2,
        }
    item: Schema = {"type": "boolean"}
    for _ in range(4):
        item = {"type": "array", "items": item, "maxItems": 2}
        yield item


def _objects() -> Iterator[Schema]:
    for count in range(1, len(SCALARS) + 1):
        properties = {f"p{i}": each for i, each in enumerate(SCALARS[:count])}
        for required in (0, count // 2, count):
            yield {
                "type": "object",
                "properties": properties,
                "required": [*properties][:required],
                "additionalProperties": False,
            }
    for name in ("größe", "日本", "a b", 'quo"te', "back\\slash", "", "new\nline", "😀", "a/b~c"):
        yield closed(**{name: {"type": "integer", "minimum": 0, "maximum": 9}})
    for scalar in SCALARS:
        yield {
            "type": "object",
            "properties": {"id": {"type": "integer", "minimum": 1, "maximum": 9}},
            "required": ["id"],
            "additionalProperties": scalar,
            "maxProperties": 3,
        }
        yield {
            "type": "object",
            "patternProperties": {"^x[0-9]{1,2}$": scalar},
            "additionalProperties": False,
            "maxProperties": 2,
        }
    nested: Schema = {"type": "boolean"}
    for depth in range(10):
        nested = closed(**{f"level_{depth}": nested})
        yield nested


def _unions() -> Iterator[Schema]:
    for i, one in enumerate(SCALARS[:5]):
        for other in SCALARS[i + 1 : 5]:
            if {one["type"], other["type"]} != {"integer", "number"}:
                yield {"oneOf": [one, other]}
            yield {"anyOf": [one, closed(value=other)]}
    for kinds in (["string", "null"], ["integer", "boolean"], ["null", "boolean", "integer"]):
        yield closed(value={"type": kinds, "maxLength": 4})
    yield {"allOf": [{"type": "integer", "minimum": 3}, {"maximum": 12}]}
    yield {"allOf": [closed(a=SHORT), {"properties": {"a": {"minLength": 2}}}]}
    shapes = [closed(kind={"const": kind}, size=SCALARS[i]) for i, kind in enumerate("abc")]
    yield {"oneOf": shapes}
    yield {"anyOf": shapes}
    yield {"type": "array", "items": {"oneOf": shapes}, "minItems": 1, "maxItems": 3}


def _references() -> Iterator[Schema]:
    for each in SCALARS:
        yield {**closed(a={"$ref": "#/$defs/x"}, b={"$ref": "#/$defs/x"}), "$defs": {"x": each}}
        link = {**closed(value=each, next={"anyOf": [{"type": "null"}, {"$ref": "#/$defs/link"}]})}
        yield {"$ref": "#/$defs/link", "$defs": {"link": link}}
        tree = {
            "type": "object",
            "properties": {
                "leaf": each,
                "kids": {"type": "array", "items": {"$ref": "#"}, "maxItems": 1},
            },
            "required": ["leaf"],
            "additionalProperties": False,
        }
        yield tree


def _pairs() -> Iterator[Schema]:
    """Every two kinds beside each other, one of them optional."""
    for one in SCALARS:
        for other in SCALARS:
            pair = closed(first=one, second=other)
            yield {**pair, "required": ["first"]}
            yield {"type": "array", "items": pair, "minItems": 1, "maxItems": 2}


def schemas() -> list[Schema]:
    """All of them, always the same."""
    kinds = (_strings, _numbers, _enums, _arrays, _objects, _unions, _references, _pairs)
    return [schema for kind in kinds for schema in kind()]


def document(schema: Any, rng: random.Random, root: Any = None, depth: int = 0) -> Any:
    """A document that the schema is likely to allow: whoever uses it asks a validator."""
    root = schema if root is None else root
    if "$ref" in schema:
        part = root
        for name in filter(None, schema["$ref"].removeprefix("#").split("/")):
            part = part[name]
        return document(part, rng, root, depth + 1)
    if "const" in schema:
        return schema["const"]
    if "enum" in schema:
        return rng.choice(schema["enum"])
    for union in ("oneOf", "anyOf"):
        if union in schema:
            parts = schema[union]
            return document(parts[0] if depth > 3 else rng.choice(parts), rng, root, depth + 1)
    if "allOf" in schema:
        merged: Schema = {}
        for part in schema["allOf"]:
            merged = {**part, **merged}
        return document(merged, rng, root, depth)
    kind = schema.get("type", "null")
    match rng.choice(kind) if isinstance(kind, list) else kind:
        case "string":
            if "pattern" in schema:
                return rng.choice(PATTERNS[schema["pattern"]])
            if "format" in schema:
                return rng.choice(FORMATS[schema["format"]])
            size = rng.randint(schema.get("minLength", 0), schema.get("maxLength", 9))
            return "".join(rng.choice('ab "\\/\n\té日😀') for _ in range(size))
        case "integer":
            low = schema.get("minimum", schema.get("exclusiveMinimum", -(10**6) - 1) + 1)
            high = schema.get("maximum", schema.get("exclusiveMaximum", 10**6 + 1) - 1)
            step = schema.get("multipleOf", 1)
            return rng.randint(min(low, high), high) // step * step
        case "number":
            low = schema.get("minimum", schema.get("exclusiveMinimum", -1e6))
            high = schema.get("maximum", schema.get("exclusiveMaximum", 1e6))
            # The library takes 7 for {"minimum": 7, "maximum": 7}, and not 7.0.
            return low if low == high else round(rng.uniform(min(low, high), high), 2)
        case "boolean":
            return rng.random() < 0.5
        case "array":
            given = schema.get("prefixItems", [])
            firsts = [document(part, rng, root, depth + 1) for part in given]
            rest = schema.get("items", False)
            least = max(0, schema.get("minItems", 0) - len(firsts))
            most = least if depth > 3 else max(least, schema.get("maxItems", 4) - len(firsts))
            count = rng.randint(least, most) if rest else 0
            return firsts + [document(rest, rng, root, depth + 1) for _ in range(count)]
        case "object":
            return _members(schema, rng, root, depth)
    return None


def _members(schema: Schema, rng: random.Random, root: Any, depth: int) -> Any:
    """In the order of the schema, as answers have them."""
    made = {
        name: document(part, rng, root, depth + 1)
        for name, part in schema.get("properties", {}).items()
        if name in schema.get("required", ()) or (depth < 4 and rng.random() < 0.5)
    }
    for part in schema.get("patternProperties", {}).values():
        made[f"x{rng.randint(0, 9)}"] = document(part, rng, root, depth + 1)
    if more := schema.get("additionalProperties"):
        made["mehr é"] = document(more, rng, root, depth + 1)
    return made
