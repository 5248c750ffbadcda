"""Calls that are a name and then the JSON of the arguments."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass

from asyncinfer.tools.delimiters import Delimiters
from asyncinfer.tools.json_calls import nowhere, read_arguments, read_object
from asyncinfer.tools.lark import json_rule
from asyncinfer.tools.output import Output
from asyncinfer.tools.source import Parsing, Source
from asyncinfer.tools.tool import Tool

__all__ = ["MistralCalls", "NamedCalls", "TaggedCalls"]


@dataclass(frozen=True)
class NamedCalls:
    """`<begin>name<between>{...}<end>`, one or several of them between an opening and a close.

    Args:
        open, close: around all calls.
        begin, end: around each.
        type_end: ends a call's type, which comes before its name; empty where there is none.
        between: between name and arguments.
        before: text before the arguments in a restricted answer, and `after`: behind them.
    """

    open: str
    close: str
    begin: str
    end: str
    between: str
    type_end: str = ""
    before: str = ""
    after: str = ""

    @property
    def opens(self) -> tuple[str, ...]:
        return (self.open,)

    @property
    def repeats(self) -> bool:
        return False

    @property
    def delimiters(self) -> tuple[str, ...]:
        return (self.open, self.close, self.begin, self.end, self.between, self.type_end)

    def read(
        self, source: Source, out: Output, tools: Mapping[str, Tool], opened: str
    ) -> Parsing[None]:
        out.delimiter()
        while True:
            found = yield from source.until((self.begin, self.close), nowhere)
            if found != self.begin:
                return
            source.record()
            if self.type_end:
                yield from source.until((self.type_end,), nowhere)
            parts: list[str] = []
            if (yield from source.until((self.between, self.end), parts.append)) is None:
                return
            name = "".join(parts).strip()
            if name not in tools:
                yield from source.until((self.end,), nowhere)
                out.content(source.no_call(self.begin))
                continue
            source.recorded()
            out.call(name)
            # Some models write a Markdown fence around the arguments.
            yield from source.before("{", nowhere)
            yield from read_arguments(source, out.arguments)
            if (yield from source.until((self.end,), nowhere)) is None:
                return
            out.call_ends()

    def rules(self, tools: tuple[Tool, ...], parallel: bool, delimiters: Delimiters) -> str:
        lark = delimiters.lark
        rules = [f"call: one{'+' if parallel else ''} {lark(self.close)}"]
        rules.append("one: " + " | ".join(f"one_{index}" for index in range(len(tools))))
        kind = f'"function" {lark(self.type_end)} ' if self.type_end else ""
        for index, tool in enumerate(tools):
            name = f"{lark(self.begin)} {kind}{json.dumps(tool.name)} {lark(self.between)}"
            before = f" {json.dumps(self.before)}" if self.before else ""
            after = f" {json.dumps(self.after)}" if self.after else ""
            rules.append(f"one_{index}: {name}{before} args_{index}{after} {lark(self.end)}")
            rules.append(json_rule(f"args_{index}", tool.schema))
        return "\n".join(rules)


@dataclass(frozen=True)
class MistralCalls:
    """`[TOOL_CALLS]name[ARGS]{...}`, in older models `[TOOL_CALLS] [{"name": ...}, ...]`.

    Args:
        named: a restricted answer writes the first of these.
    """

    named: bool = True

    opens = ("[TOOL_CALLS]",)
    delimiters = ("[TOOL_CALLS]", "[ARGS]", "[CALL_ID]")

    @property
    def repeats(self) -> bool:
        return self.named

    def read(
        self, source: Source, out: Output, tools: Mapping[str, Tool], opened: str
    ) -> Parsing[None]:
        out.delimiter()
        yield from source.space()
        if (yield from source.next()) == "[" and (yield from source.literal("[")):
            more = True
            while more:
                source.record()
                yield from source.space()
                if not (yield from read_object(source, out, tools)):
                    out.content(source.no_call())
                    break
                yield from source.space()
                more = yield from source.literal(",")
            yield from source.literal("]")
            return
        parts: list[str] = []
        source.record()
        yield from source.before("{[", parts.append)
        name, call_id = "".join(parts).strip(), None
        if (yield from source.literal("[CALL_ID]")):
            parts.clear()
            yield from source.before("{[", parts.append)
            call_id = "".join(parts).strip()
        yield from source.literal("[ARGS]")
        if name not in tools:
            out.content(source.no_call(opened))
            return
        source.recorded()
        if not (yield from source.next()):
            return
        out.call(name, call_id)
        if (yield from read_arguments(source, out.arguments)):
            out.call_ends()

    def rules(self, tools: tuple[Tool, ...], parallel: bool, delimiters: Delimiters) -> str:
        rules = []
        for index, tool in enumerate(tools):
            if self.named:
                args = delimiters.lark("[ARGS]")
                rules.append(f"one_{index}: {json.dumps(tool.name)} {args} args_{index}")
            else:
                begin = f'{{"name": {json.dumps(tool.name)}, "arguments": '
                rules.append(f'one_{index}: {json.dumps(begin)} args_{index} "}}"')
            rules.append(json_rule(f"args_{index}", tool.schema))
        several = ' (", " one)*' if parallel else ""
        rules.append("one: " + " | ".join(f"one_{index}" for index in range(len(tools))))
        rules.append("call: one" if self.named else f'call: " "? "[" one{several} "]"')
        return "\n".join(rules)


@dataclass(frozen=True)
class TaggedCalls:
    """One call as `<open>name<between>{...}<close>`. `between` may be empty."""

    open: str
    between: str
    close: str

    repeats = True

    @property
    def opens(self) -> tuple[str, ...]:
        return (self.open,)

    @property
    def delimiters(self) -> tuple[str, ...]:
        return (self.open, self.between, self.close)

    def read(
        self, source: Source, out: Output, tools: Mapping[str, Tool], opened: str
    ) -> Parsing[None]:
        source.record()
        parts: list[str] = []
        if self.between:
            yield from source.until((self.between, self.close), parts.append)
        else:
            yield from source.before("{", parts.append)
        name = "".join(parts).strip()
        if name not in tools:
            out.content(source.no_call(opened))
            return
        source.recorded()
        out.call(name)
        yield from source.space()
        if (yield from read_arguments(source, out.arguments)):
            out.call_ends()
        yield from source.until((self.close,), nowhere)
        out.delimiter()

    def rules(self, tools: tuple[Tool, ...], parallel: bool, delimiters: Delimiters) -> str:
        between = f" {delimiters.lark(self.between)}" if self.between else ""
        rules = ["call: " + " | ".join(f"one_{index}" for index in range(len(tools)))]
        for index, tool in enumerate(tools):
            close = delimiters.lark(self.close)
            rules.append(f"one_{index}: {json.dumps(tool.name)}{between} args_{index} {close}")
            rules.append(json_rule(f"args_{index}", tool.schema))
        return "\n".join(rules)
