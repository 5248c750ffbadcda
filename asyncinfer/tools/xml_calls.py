"""Calls that are XML: each argument between tags of its own."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

from asyncinfer.tools.argument_types import as_json, is_text, resolved, text_rule, types_of
from asyncinfer.tools.delimiters import Delimiters
from asyncinfer.tools.json_calls import nowhere
from asyncinfer.tools.lark import Unheld, json_rule
from asyncinfer.tools.output import Output
from asyncinfer.tools.source import Source, Steps
from asyncinfer.tools.tool import Tool

__all__ = ["XmlCalls", "check_object", "named_arguments"]

#: Keywords of a tool's schema that hold where each argument is written by itself.
_OBJECT_KEYS: Final = frozenset(
    [
        *("type", "properties", "required", "additionalProperties", "description", "title"),
        *("$schema", "$defs", "definitions", "examples", "strict"),
    ]
)


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
    ) -> Steps[None]:
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
            taken = source.delimiters.spelled(opened) + source.recorded()
            out.content(source.delimiters.shown(taken))
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

    def _value(self, source: Source, out: Output, tool: Tool, key: str) -> Steps[str | None]:
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
        rules = ["call: " + " | ".join(f"one_{index}" for index in range(len(tools)))]
        for index, tool in enumerate(tools):
            names = named_arguments(rules, f"arg_{index}", tool, self._argument(delimiters))
            name = lark(f"\n{self.name_open}{tool.name}{self.name_close}\n")
            end = lark(f"{self.end}{line if self.end else ''}{self.close}")
            rules.append(f"one_{index}: {name} {names} {end}")
        return "\n".join(rules)

    def _argument(self, delimiters: Delimiters) -> Any:
        lark, line = delimiters.lark, "\n" if self.line else ""

        def argument(rules: list[str], rule: str, tool: Tool, key: str, schema: Any) -> str:
            begin = f"{self.key_open}{key}{self.key_close}{line}"
            between = "\n" if self.value_open else ""
            close = f"{line}{self.value_close}"
            value, ending = f"{rule}_v", lark(close)
            if is_text(schema, tool.schema):
                held, place = resolved(schema, tool.schema), f"{tool.name}/{key}"
                token = delimiters.one_token(close)
                text = text_rule(value, held, "" if token else close, place)
                ending = ending if token else ""
            else:
                shared = {k: tool.schema[k] for k in ("$defs", "definitions") if k in tool.schema}
                text = json_rule(value, {**shared, **_plain(schema)})
            rules.append(text)
            opening = lark(f"{begin}{between}{self.value_open}")
            rules.append(f'{rule}: {opening} {value} {ending} "\\n"')
            return rule

        return argument


def named_arguments(rules: list[str], prefix: str, tool: Tool, argument: Any) -> str:
    """Add a rule for each argument. Returns the sequence of their names, in the schema's order.

    Raises `Unheld` for a schema that says more than its properties.
    """
    check_object(tool.name, tool.schema)
    required = tool.schema.get("required", ())
    names = []
    for index, (key, schema) in enumerate(tool.schema.get("properties", {}).items()):
        name = argument(rules, f"{prefix}_{index}", tool, key, schema)
        names.append(name if key in required else f"{name}?")
    return " ".join(names)


def check_object(name: str, schema: Mapping[str, Any]) -> None:
    """Raise `Unheld` for a schema of an object that says more than its properties."""
    for key in schema.keys() - _OBJECT_KEYS:
        raise Unheld(f"{name}/{key}", repr(schema[key])[:80])
    for key in schema.get("required", ()):
        if key not in schema.get("properties", {}):
            raise Unheld(f"{name}/required", key)


def _plain(schema: Any) -> Mapping[str, Any]:
    return schema if isinstance(schema, Mapping) else {}
