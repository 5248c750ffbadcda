"""Calls as Python writes them: `[f(a=1), g(b="x")]`."""

from __future__ import annotations

import ast
import json
import re
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, Final

from asyncinfer.tools.argument_types import arguments_of, value_rule
from asyncinfer.tools.delimiters import Delimiters
from asyncinfer.tools.lark import joined
from asyncinfer.tools.output import Output
from asyncinfer.tools.source import Parsing, Put, Source
from asyncinfer.tools.tool import Tool

__all__ = ["PythonCalls"]

#: What a name of an argument ends with.
_SYNTAX: Final = "=(),: "

#: Characters of a value that is parsed as Python, on an event loop: an f-string takes time by the
#: square of its length, 50 ms for 16,384. One string takes 2 ms for its bound.
MOST_PARSED: Final = 4_096
MOST_IN_STRING: Final = 65_536

_NAMES: Final = {"true": True, "false": False, "null": None}
_STRING: Final = re.compile(r"""'(?:[^'\\\n]++|\\.)*+'|"(?:[^"\\\n]++|\\.)*+\"""", re.DOTALL)


@dataclass(frozen=True)
class PythonCalls:
    """The whole answer is a list of calls."""

    opens: tuple[str, ...] = ()
    delimiters: tuple[str, ...] = ("<|python_start|>", "<|python_end|>")

    @property
    def repeats(self) -> bool:
        return False

    def read(
        self, source: Source, out: Output, tools: Mapping[str, Tool], opened: str
    ) -> Parsing[None]:
        source.record()
        yield from source.literal(self.delimiters[0])
        yield from source.space()
        if not (yield from source.literal("[")) or not (yield from self._call(source, out, tools)):
            out.content(source.no_call())
            return
        while True:
            yield from source.space()
            if not (yield from source.literal(",")):
                break
            source.record()
            yield from source.space()
            if not (yield from self._call(source, out, tools)):
                out.content(source.no_call())
                return
        yield from source.literal("]")
        out.delimiter()
        yield from source.literal(self.delimiters[1])

    def _call(self, source: Source, out: Output, tools: Mapping[str, Tool]) -> Parsing[bool]:
        parts: list[str] = []
        yield from source.before("([]{},\"'\n", parts.append)
        name = "".join(parts).strip()
        if name not in tools or not (yield from source.literal("(")):
            return False
        source.recorded()
        out.call(name)
        names, count = [*tools[name].schema.get("properties", ())], 0
        while True:
            yield from source.space()
            if (yield from source.literal(")")):
                out.arguments("}" if count else "")
                out.call_ends()
                return True
            if (yield from source.literal(",")):
                continue
            parts.clear()
            yield from source.before("=()[]{},\"'", parts.append)
            named = yield from source.literal("=")
            if named:
                key = "".join(parts).strip()
                parts.clear()
                yield from source.space()
            elif count < len(names):
                # An argument without its name is the one at this place in the schema.
                key = names[count]
            else:
                return True
            whole = yield from _value(source, parts.append)
            text = "".join(parts)
            if not whole or not (named or text.strip()):
                return True
            told = f"{json.dumps(key, ensure_ascii=False)}: {_as_json(text)}"
            out.arguments(("{" if count == 0 else ", ") + told)
            count += 1

    def rules(self, tools: tuple[Tool, ...], parallel: bool, delimiters: Delimiters) -> str:
        several = ' (", " one)*' if parallel else ""
        rules = [f'call: "[" one{several} "]"']
        rules.append("one: " + " | ".join(f"one_{index}" for index in range(len(tools))))
        for index, tool in enumerate(tools):
            names: list[tuple[str, bool]] = []
            for at, (key, schema, required) in enumerate(
                arguments_of(tool.name, tool.schema, _SYNTAX)
            ):
                rule = f"arg_{index}_{at}"
                rules.append(value_rule(f"{rule}_v", schema, tool.schema))
                rules.append(f"{rule}: {json.dumps(key + '=')} {rule}_v")
                names.append((rule, required))
            rules += joined(f"args_{index}", names, ", ")
            rules.append(f'one_{index}: {json.dumps(tool.name + "(")} args_{index} ")"')
        return "\n".join(rules)


def _value(source: Source, put: Put) -> Parsing[bool]:
    """Put the text of one value, up to the comma or bracket behind it; False where it is cut."""
    depth, quote = 0, ""
    while char := (yield from source.next()):
        if "\ud800" <= char <= "\udfff":
            return False
        if quote:
            if char == "\\":
                put(source.take())
                if not (yield from source.next()):
                    return False
            elif char == quote:
                quote = ""
        elif char in "\"'":
            quote = char
        elif char in "([{":
            depth += 1
        elif char in ")]}":
            if not depth:
                return True
            depth -= 1
        elif char == "," and not depth:
            return True
        put(source.take())
    return False


def _as_json(text: str) -> str:
    """The JSON of a value: the text itself where it is JSON already, or too long for Python."""
    text = text.strip()
    try:
        json.loads(text, parse_constant=int)
        return text
    except (ValueError, RecursionError):
        most = MOST_IN_STRING if _STRING.fullmatch(text) else MOST_PARSED
    if len(text) <= most:
        with suppress(ValueError, SyntaxError, RecursionError, MemoryError):
            value = _evaluated(ast.parse(text, mode="eval").body)
            return json.dumps(value, ensure_ascii=False, allow_nan=False)
    return json.dumps(text, ensure_ascii=False)


def _evaluated(node: ast.expr) -> Any:
    match node:
        case ast.Constant(value=str() | int() | float() | None as value):
            return value
        case ast.Name(id=name) if name in _NAMES:
            return _NAMES[name]
        case ast.List(elts=parts) | ast.Tuple(elts=parts):
            return [_evaluated(part) for part in parts]
        case ast.UnaryOp(op=ast.USub(), operand=ast.Constant(value=int() | float() as value)):
            return -value
        case ast.Dict(keys=keys, values=values):
            named = [_evaluated(key) if key is not None else None for key in keys]
            return dict(zip(map(str, named), map(_evaluated, values), strict=True))
    raise ValueError("no literal")
