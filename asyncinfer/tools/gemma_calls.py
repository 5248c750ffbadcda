"""Calls of Gemma: `call:f{key:<|"|>text<|"|>,n:1}`, which is JSON except for quotes and keys."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

from asyncinfer.bounds import MAX_SCHEMA_DEPTH
from asyncinfer.tools.argument_types import arguments_of, as_json, is_text, resolved, text_rule
from asyncinfer.tools.delimiters import Delimiters
from asyncinfer.tools.json_calls import nowhere
from asyncinfer.tools.lark import Unheld, joined, json_rule
from asyncinfer.tools.output import Output
from asyncinfer.tools.source import Parsing, Source
from asyncinfer.tools.tool import Tool

__all__ = ["GemmaCalls"]

#: Levels of lists and objects in an argument.
_DEEPEST: Final = 64
#: What a property's name ends with, or begins.
_SYNTAX: Final = ':,{}[]"'


@dataclass(frozen=True)
class GemmaCalls:
    """One call between `open` and `close`, with `quote` around texts."""

    open: str
    close: str
    quote: str

    @property
    def opens(self) -> tuple[str, ...]:
        return (self.open,)

    @property
    def repeats(self) -> bool:
        return True

    @property
    def delimiters(self) -> tuple[str, ...]:
        return (self.open, self.close, self.quote)

    def read(
        self, source: Source, out: Output, tools: Mapping[str, Tool], opened: str
    ) -> Parsing[None]:
        source.record()
        parts: list[str] = []
        yield from source.space()
        called = yield from source.literal("call:")
        yield from source.before("{", parts.append)
        name = "".join(parts).strip()
        if not called or name not in tools or (yield from source.next()) != "{":
            out.content(source.no_call(opened))
            return
        source.recorded()
        out.call(name)
        if (yield from self._value(source, out, 0)):
            out.call_ends()
        yield from source.until((self.close,), nowhere)
        out.delimiter()

    def _value(self, source: Source, out: Output, depth: int) -> Parsing[bool]:
        """Put the JSON of one value; False where it is cut short or not a value."""
        yield from source.space()
        if (yield from source.literal(self.quote)):
            out.arguments('"')
            if (yield from source.until((self.quote,), out.quoted)) is None:
                return False
            out.arguments('"')
            return True
        char = yield from source.next()
        if not char or char not in "{[":
            parts: list[str] = []
            yield from source.before(",}]", parts.append)
            if not (yield from source.next()):
                return False
            out.arguments(as_json("".join(parts).strip(), None))
            return True
        if depth > _DEEPEST:
            return False
        out.arguments(source.take())
        close, count = "}" if char == "{" else "]", 0
        while True:
            yield from source.space()
            if (yield from source.literal(close)):
                out.arguments(close)
                return True
            if (yield from source.literal(",")):
                continue
            key = ""
            if char == "{":
                parts = []
                yield from source.before(":,}]", parts.append)
                if not (yield from source.literal(":")):
                    return False
                key = json.dumps("".join(parts).strip().strip('"'), ensure_ascii=False) + ": "
            elif (yield from source.next()) in ("", "}"):
                return False
            out.arguments((", " if count else "") + key)
            count += 1
            if not (yield from self._value(source, out, depth + 1)):
                return False

    def rules(self, tools: tuple[Tool, ...], parallel: bool, delimiters: Delimiters) -> str:
        rules = ["call: " + " | ".join(f"one_{index}" for index in range(len(tools)))]
        close = delimiters.lark(self.close)
        for index, tool in enumerate(tools):
            value = _Rules(self, rules, f"value_{index}", tool, delimiters).of(tool.schema, "")
            rules.append(f"one_{index}: {json.dumps('call:' + tool.name)} {value} {close}")
        return "\n".join(rules)


class _Rules:
    """Rules for values that fit the schemas of one tool."""

    def __init__(
        self,
        syntax: GemmaCalls,
        rules: list[str],
        prefix: str,
        tool: Tool,
        delimiters: Delimiters,
    ) -> None:
        self._quote = delimiters.lark(syntax.quote)
        self._token = delimiters.one_token(syntax.quote)
        self._end = syntax.quote
        self._rules = rules
        self._prefix = prefix
        self._tool = tool
        self._count = 0
        #: The rule's name of each schema that was referred to, which may refer to itself.
        self._named: dict[str, str] = {}

    def of(self, schema: Any, place: str) -> str:
        """The name of a rule for what fits `schema`."""
        target = schema.get("$ref") if isinstance(schema, Mapping) else None
        if isinstance(target, str) and target in self._named:
            return self._named[target]
        if place.count("/") > MAX_SCHEMA_DEPTH:
            raise Unheld(f"{self._tool.name}{place}", f"more than {MAX_SCHEMA_DEPTH} levels")
        name = f"{self._prefix}_{self._count}"
        self._count += 1
        if isinstance(target, str):
            self._named[target] = name
        self._rules.append(self._rule(name, resolved(schema, self._tool.schema), place))
        return name

    def _rule(self, name: str, schema: Mapping[str, Any], place: str) -> str:
        where = f"{self._tool.name}{place}"
        parts = schema.get("anyOf") or schema.get("oneOf")
        if isinstance(parts, list):
            found = [self.of(part, f"{place}/anyOf/{at}") for at, part in enumerate(parts)]
            return f"{name}: {' | '.join(found)}"
        if is_text(schema, self._tool.schema):
            text = text_rule(f"{name}_t", schema, "" if self._token else self._end, where)
            self._rules.append(text)
            return f"{name}: {self._quote} {name}_t {self._quote if self._token else ''}"
        match schema.get("type"):
            case "object":
                return self._object(name, schema, place)
            case "array":
                for key in schema.keys() - {"type", "items", "description", "title", "default"}:
                    raise Unheld(f"{where}/{key}", repr(schema[key])[:80])
                if "items" not in schema:
                    raise Unheld(f"{where}/items", "none")
                item = self.of(schema["items"], f"{place}/items")
                return f'{name}: "[" ({item} ("," {item})*)? "]"'
            case "integer" | "number" | "boolean" | "null":
                return json_rule(name, schema)
        raise Unheld(where, repr(dict(schema))[:80])

    def _object(self, name: str, schema: Mapping[str, Any], place: str) -> str:
        parts: list[tuple[str, bool]] = []
        for key, one, required in arguments_of(f"{self._tool.name}{place}", schema, _SYNTAX):
            at, value = len(parts), self.of(one, f"{place}/{key}")
            self._rules.append(f"{name}_k{at}: {json.dumps(key + ':')} {value}")
            parts.append((f"{name}_k{at}", required))
        self._rules.extend(joined(f"{name}_o", parts, ","))
        return f'{name}: "{{" {name}_o "}}"'
