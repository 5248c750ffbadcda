"""Answers of gpt-oss: messages that name their channel and, for a call, whom they are to."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Final

from asyncinfer.tools.delimiters import Delimiters
from asyncinfer.tools.family import TEXT, ToolFamily
from asyncinfer.tools.json_calls import nowhere
from asyncinfer.tools.lark import content_rule, json_rule
from asyncinfer.tools.output import Output
from asyncinfer.tools.source import Parsing, Source
from asyncinfer.tools.tool import Tool

__all__ = ["Harmony"]

_TO: Final = re.compile(r"to=functions\.([\w.\-]+)")
_CHANNEL, _MESSAGE, _CONSTRAIN = "<|channel|>", "<|message|>", "<|constrain|>"
_ENDS: Final = ("<|end|>", "<|call|>", "<|return|>", "<|start|>")


@dataclass(frozen=True)
class Harmony(ToolFamily):
    """`<|channel|>analysis<|message|>...<|end|><|start|>assistant<|channel|>final<|message|>...`"""

    def texts(self) -> Iterator[str]:
        yield from (_CHANNEL, _MESSAGE, _CONSTRAIN, *_ENDS)

    def thinking(self, prompt: str, begun: str = "") -> bool:
        return False

    def read(
        self, source: Source, out: Output, tools: Mapping[str, Tool], thinking: bool
    ) -> Parsing[None]:
        """Messages one after the other; the first one's role is in the prompt."""
        while True:
            header: list[str] = []
            channel: list[str] = []
            found = yield from source.until((_CHANNEL, _MESSAGE, *_ENDS), header.append)
            if found == _CHANNEL:
                stops = (_CONSTRAIN, _MESSAGE, *_ENDS)
                found = yield from source.until(stops, channel.append)
            if found == _CONSTRAIN:
                found = yield from source.until((_MESSAGE, *_ENDS), nowhere)
            if found is None:
                return
            if found != _MESSAGE:
                continue
            to = _TO.search("".join(header + channel))
            out.delimiter()
            if to is not None and to[1] in tools:
                out.call(to[1])
                yield from source.space()
                whole = yield from source.json(out.arguments)
                found = yield from source.until(_ENDS, nowhere)
                # The token that ends a call ends the answer.
                if whole or found is not None:
                    out.call_ends()
            else:
                thought = "".join(channel).strip().startswith("analysis")
                put = out.reasoning if thought else out.content
                found = yield from source.until(_ENDS, put)
            if found is None:
                return
            out.delimiter()

    def before(self, delimiters: Delimiters, thinking: bool) -> str:
        said, final = self._said(delimiters), f'{delimiters.lark(_CHANNEL)} "final"'
        return f"before: said* {final} {delimiters.lark(_MESSAGE)}\n{said}\n{TEXT}"

    def _said(self, delimiters: Delimiters) -> str:
        """The rule of a message before the last one."""
        lark = delimiters.lark
        return (
            f'said: {lark(_CHANNEL)} ("analysis" | "commentary") {lark(_MESSAGE)} TEXT? '
            f'{lark("<|end|>")} {lark("<|start|>")} "assistant"'
        )

    def rules(
        self,
        tools: tuple[Tool, ...],
        delimiters: Delimiters,
        *,
        thinking: bool,
        must_call: bool,
        parallel: bool,
        content: Mapping[str, Any] | None = None,
    ) -> str | None:
        lark = delimiters.lark
        told = "TEXT?" if content is None else "content"
        named = " | ".join(f"one_{index}" for index in range(len(tools)))
        rules = [
            f"start: said* ({'one' if must_call else 'one | last'})",
            self._said(delimiters),
            f'last: {lark(_CHANNEL)} "final" {lark(_MESSAGE)} {told}',
            f"one: {named}",
            TEXT,
        ]
        if content is not None:
            rules.append(content_rule("content", content))
        for index, tool in enumerate(tools):
            to = json.dumps(f"commentary to=functions.{tool.name} ")
            rules.append(
                f'one_{index}: {lark(_CHANNEL)} {to} {lark(_CONSTRAIN)} "json" {lark(_MESSAGE)} '
                f"args_{index}"
            )
            rules.append(json_rule(f"args_{index}", tool.schema))
        return "\n".join(rules)
