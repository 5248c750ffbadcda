"""Calls that are JSON objects: `{"name": "f", "arguments": {...}}`."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

from asyncinfer.tools.delimiters import Delimiters
from asyncinfer.tools.lark import json_rule
from asyncinfer.tools.output import Output
from asyncinfer.tools.source import Parsing, Put, Source
from asyncinfer.tools.tool import Tool

__all__ = ["JsonCalls", "nowhere", "read_arguments", "read_object"]

#: Keys under which objects hold the arguments.
_ARGUMENTS: Final = ("arguments", "parameters")


@dataclass(frozen=True)
class JsonCalls:
    """Between delimiters, or as the whole answer: one object, several, or a list of them.

    Args:
        opens: what begins calls; empty where the answer begins with an object or a list.
        close: what ends them; empty where nothing does.
        key: under which a restricted answer writes the arguments.
        listed: a restricted answer writes a list.
        separator: between objects of a restricted bare answer.
        tag: may come before a bare answer.
    """

    opens: tuple[str, ...] = ()
    close: str = ""
    key: str = "arguments"
    listed: bool = False
    separator: str = ", "
    tag: str = ""

    @property
    def repeats(self) -> bool:
        return bool(self.opens) and not self.listed

    @property
    def delimiters(self) -> tuple[str, ...]:
        return (*self.opens, self.close, self.tag)

    def read(
        self, source: Source, out: Output, tools: Mapping[str, Tool], opened: str
    ) -> Parsing[None]:
        begun: str | None = opened
        while begun is not None:
            begun = yield from self._read_between(source, out, tools, begun)

    def _read_between(
        self, source: Source, out: Output, tools: Mapping[str, Tool], opened: str
    ) -> Parsing[str | None]:
        """Read what follows `opened` up to its end. Returns the opening of further calls that ended
        it, if one did."""
        source.record()
        yield from source.space()
        if self.tag:
            yield from source.literal(self.tag)
        listed = yield from source.literal("[")
        if listed:
            yield from source.space()
        if not (yield from read_object(source, out, tools)):
            out.content(source.no_call(opened))
            return None
        while True:
            yield from source.space()
            if not (yield from source.literal(",")):
                yield from source.literal(";")
            yield from source.space()
            if (yield from source.next()) != "{":
                break
            source.record()
            if not (yield from read_object(source, out, tools)):
                out.content(source.no_call())
                if not self.close:
                    return None
                break
        if listed:
            yield from source.literal("]")
        out.delimiter()
        if not self.close:
            return None
        parts: list[str] = []
        ended = yield from source.until((self.close, *self.opens), parts.append)
        if ended != self.close:
            # The call was not closed, so what follows it is not a part of it.
            out.content("".join(parts))
        return ended if ended in self.opens else None

    def rules(self, tools: tuple[Tool, ...], parallel: bool, delimiters: Delimiters) -> str:
        several = f" ({json.dumps(self.separator)} one)*"
        one = "one" + (several if parallel and not self.repeats else "")
        if self.listed:
            one = f'"[" {one} "]"'
        inner = f'"\\n" {one} "\\n"' if self.repeats else one
        close = f" {delimiters.lark(self.close)}" if self.close else ""
        rules = [f"call: {inner}{close}"]
        rules.append("one: " + " | ".join(f"one_{index}" for index in range(len(tools))))
        for index, tool in enumerate(tools):
            begin = f'{{"name": {json.dumps(tool.name)}, "{self.key}": '
            rules.append(f'one_{index}: {json.dumps(begin)} args_{index} "}}"')
            rules.append(json_rule(f"args_{index}", tool.schema))
        return "\n".join(rules)


def read_object(source: Source, out: Output, tools: Mapping[str, Tool]) -> Parsing[bool]:
    """Read one call while the source records; False where there is none, and nothing was put."""
    if not (yield from source.literal("{")):
        return False
    name, held, argued = "", "", False
    while True:
        yield from source.space()
        if (yield from source.literal("}")):
            if name:
                out.call_ends()
            return bool(name)
        if (yield from source.literal(",")):
            continue
        key = yield from _string(source)
        yield from source.space()
        if key is None or not (yield from source.literal(":")):
            return bool(name)
        yield from source.space()
        if key == "name" and not name:
            name = (yield from _string(source)) or ""
            if name not in tools:
                return False
            source.recorded()
            out.call(name)
            out.arguments(held)
        elif key in _ARGUMENTS and not argued:
            argued, parts = True, list[str]()
            yield from read_arguments(source, out.arguments if name else parts.append)
            held = "".join(parts)
        elif not (yield from source.json(nowhere)):
            return bool(name)


def read_arguments(source: Source, put: Put) -> Parsing[bool]:
    """Put the JSON of a call's arguments as it stands. Some models write it as a string, and null
    where there are none."""
    char = yield from source.next()
    if char == "n" and (yield from source.literal("null")):
        return True
    if char != '"':
        return (yield from source.json(put))
    text = yield from _string(source)
    put(text or "")
    return text is not None


def _string(source: Source) -> Parsing[str | None]:
    """Take a JSON string; None where there is none."""
    if (yield from source.next()) != '"':
        return None
    parts: list[str] = []
    if not (yield from source.json(parts.append)):
        return None
    try:
        text: str = json.loads("".join(parts), strict=False)
    except ValueError:
        return None
    return text


def nowhere(text: str) -> None:
    """A `put` for text that belongs to no part of a message."""
