"""Calls that are XML: each argument between tags of its own."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass

from asyncinfer.tools.argument_types import (
    arguments_of,
    as_json,
    is_text,
    resolved,
    text_rule,
    types_of,
    value_rule,
)
from asyncinfer.tools.delimiters import Delimiters
from asyncinfer.tools.json_calls import nowhere
from asyncinfer.tools.output import Output
from asyncinfer.tools.source import Parsing, Source
from asyncinfer.tools.tool import Tool

__all__ = ["XmlCalls"]


@dataclass(frozen=True)
class XmlCalls:
    """One call between `open` and `close`.

    Args:
        name_open, name_close: around the name; both empty where it is a line of its own.
        key_open, key_close, value_open, value_close: around each argument's name and value.
        end: ends the call, before `close`.
        line: a restricted answer writes values on lines of their own.
    """

    open: str
    close: str
    name_open: str
    name_close: str
    key_open: str
    key_close: str
    value_open: str
    value_close: str
    end: str = ""
    line: bool = True

    @property
    def opens(self) -> tuple[str, ...]:
        return (self.open,)

    @property
    def repeats(self) -> bool:
        return True

    @property
    def delimiters(self) -> tuple[str, ...]:
        return (
            *(self.open, self.close, self.name_open, self.name_close, self.key_open),
            *(self.key_close, self.value_open, self.value_close, self.end),
        )

    def read(
        self, source: Source, out: Output, tools: Mapping[str, Tool], opened: str
    ) -> Parsing[None]:
        source.record()
        parts: list[str] = []
        if self.name_open:
            yield from source.until((self.name_open, self.close), nowhere)
            found = yield from source.until((self.name_close, self.close), parts.append)
        else:
            yield from source.space()
            found = yield from source.until(("\n", self.key_open, self.close), parts.append)
        tool = tools.get("".join(parts).strip())
        if tool is None:
            out.content(source.no_call(opened))
            return
        source.recorded()
        out.call(tool.name)
        ends = tuple(end for end in (self.end, self.close) if end)
        begun, count = found == self.key_open, 0
        while found not in (None, self.close):
            if not begun:
                found = yield from source.until((self.key_open, *ends), nowhere)
                begun = found == self.key_open
                if not begun:
                    break
            begun = False
            parts.clear()
            found = yield from source.until((self.key_close, *ends), parts.append)
            if found != self.key_close:
                break
            key = "".join(parts).strip()
            out.arguments(
                ("{" if count == 0 else ", ") + json.dumps(key, ensure_ascii=False) + ": "
            )
            count += 1
            if self.value_open:
                found = yield from source.until((self.value_open, *ends), nowhere)
                if found != self.value_open:
                    break
            found = yield from self._value(source, out, tool, key)
        if found is None:
            return
        out.arguments("}" if count else "")
        out.call_ends()
        if found != self.close:
            yield from source.until((self.close,), nowhere)
        out.delimiter()

    def _value(self, source: Source, out: Output, tool: Tool, key: str) -> Parsing[str | None]:
        """Read a value; returns the text that ended it, None where the answer ended first."""
        schema = tool.schema.get("properties", {}).get(key, {})
        # A line break at either side of the value belongs to the tags.
        if self.line:
            yield from source.literal("\n")
        stops = (f"\n{self.value_close}", self.value_close) if self.line else (self.value_close,)
        if is_text(schema, tool.schema):
            out.arguments('"')
            found = yield from source.until(stops, out.quoted)
            if found is not None:
                out.arguments('"')
            return found
        parts: list[str] = []
        found = yield from source.until(stops, parts.append)
        if found is not None:
            out.arguments(as_json("".join(parts), types_of(schema, tool.schema)))
        return found

    def rules(self, tools: tuple[Tool, ...], parallel: bool, delimiters: Delimiters) -> str:
        lark, line = delimiters.lark, "\n" if self.line or not self.name_open else ""
        # A name that nothing encloses is on the line of its opening.
        begin = f"\n{self.name_open}" if self.name_open else ""
        rules = ["call: " + " | ".join(f"one_{index}" for index in range(len(tools)))]
        for index, tool in enumerate(tools):
            names = self._arguments(rules, f"arg_{index}", tool, delimiters)
            name = lark(f"{begin}{tool.name}{self.name_close}\n")
            end = lark(f"{self.end}{line if self.end else ''}{self.close}")
            rules.append(f"one_{index}: {name} {names} {end}")
        return "\n".join(rules)

    def _arguments(self, rules: list[str], prefix: str, tool: Tool, delimiters: Delimiters) -> str:
        """Add a rule for each argument. Returns the sequence of their names."""
        lark, line = delimiters.lark, "\n" if self.line else ""
        between, close = "\n" if self.value_open else "", f"{line}{self.value_close}"
        token = delimiters.one_token(close)
        names = []
        named = arguments_of(tool.name, tool.schema, (*self.delimiters, "\n"))
        for index, (key, schema, required) in enumerate(named):
            rule = f"{prefix}_{index}"
            begin = f"{self.key_open}{key}{self.key_close}{line}"
            value, ending = f"{rule}_v", lark(close)
            if is_text(schema, tool.schema):
                held, place = resolved(schema, tool.schema), f"{tool.name}/{key}"
                text = text_rule(value, held, "" if token else close, place)
                ending = ending if token else ""
            else:
                text = value_rule(value, schema, tool.schema)
            rules.append(text)
            opening = lark(f"{begin}{between}{self.value_open}")
            rules.append(f'{rule}: {opening} {value} {ending} "\\n"')
            names.append(rule if required else f"{rule}?")
        return " ".join(names)
