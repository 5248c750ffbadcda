"""`ToolFamily`: how the models of one family write reasoning and tool calls."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Final, Protocol

from asyncinfer.tools.delimiters import Delimiters
from asyncinfer.tools.lark import content_rule, escaped, lazily
from asyncinfer.tools.output import Output
from asyncinfer.tools.source import Parsing, Source
from asyncinfer.tools.tool import Tool

__all__ = ["TEXT", "CallSyntax", "Span", "ToolFamily"]

#: Lark rules of any text, and of white space between two parts of an answer.
TEXT: Final = "TEXT: /(.|\\n)+/"
GAP: Final = "GAP: /[ \\n]{1,4}/"


@dataclass(frozen=True, slots=True)
class Span:
    """A part of an answer between two delimiters."""

    open: str
    close: str


class CallSyntax(Protocol):
    """How calls are written: what reads them and what restricts an answer to them, side by side. A
    new one has a line in `SYNTAXES` of `families.py`; `python_calls.py` is an example."""

    @property
    def opens(self) -> tuple[str, ...]:
        """Any of these begins calls, and a restricted answer writes the first; empty where calls
        are the beginning of the answer itself."""

    @property
    def repeats(self) -> bool:
        """Whether each call has an opening of its own."""

    @property
    def delimiters(self) -> tuple[str, ...]:
        """All texts that may be tokens of their own."""

    def read(
        self, source: Source, out: Output, tools: Mapping[str, Tool], opened: str
    ) -> Parsing[None]:
        """Read what follows `opened`; what is no call is content. Waits by `yield`: `source.py`."""

    def rules(self, tools: tuple[Tool, ...], parallel: bool, delimiters: Delimiters) -> str:
        """Lark rules, of which `call` is what follows an opening.

        Raises `Unheld` for a schema that calls cannot be held to in this syntax.
        """


@dataclass(frozen=True)
class ToolFamily:
    """An answer of reasoning, content and calls."""

    name: str
    calls: CallSyntax | None = None
    reasoning: Span | None = None

    def texts(self) -> Iterator[str]:
        """Every delimiter."""
        if self.calls is not None:
            yield from self.calls.delimiters
        if self.reasoning is not None:
            yield from (self.reasoning.open, self.reasoning.close)

    def thinking(self, prompt: str, begun: str = "") -> bool:
        """Whether the prompt, as the template wrote it, has opened the reasoning at its end, or in
        `begun`, the message that the answer goes on with."""
        if self.reasoning is None:
            return False
        open, close = self.reasoning.open.strip(), self.reasoning.close.strip()
        return prompt.rstrip().endswith(open) or begun.rfind(open) > begun.rfind(close)

    def read(
        self, source: Source, out: Output, tools: Mapping[str, Tool], thinking: bool
    ) -> Parsing[None]:
        """Read an answer, which may call tools of these names."""
        reasoning, calls = self.reasoning, self.calls if tools else None
        opens = () if calls is None else calls.opens
        # Calls without an opening are the beginning of the answer, after its reasoning.
        bare = calls if not opens else None
        begin, end = ("", "") if reasoning is None else (reasoning.open, reasoning.close)
        stops = tuple(text for text in (begin, end, *opens) if text)
        if thinking:
            out.reasoning_begins()
        while True:
            if thinking:
                if (yield from source.until((end,), out.reasoning)) is None:
                    return
                out.delimiter()
                thinking = False
            if bare is not None:
                yield from bare.read(source, out, tools, "")
            found = yield from source.until(stops, out.content)
            if found is None:
                return
            if found in opens and calls is not None:
                yield from calls.read(source, out, tools, found)
            else:
                out.delimiter()
                thinking = found == begin

    def before(self, delimiters: Delimiters, thinking: bool) -> str:
        """Lark rules of `before`: what comes before an answer that has to fit a format, which is
        its reasoning. Empty where nothing does."""
        if self.reasoning is None:
            return ""
        rules = [TEXT, GAP]
        rules.append(f"before: {self._thought(rules, delimiters, thinking, ' GAP?')}")
        return "\n".join(rules)

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
        """Lark rules of an answer whose calls fit their tools; None where any text does. With a
        `content` the answer is calls alone, or JSON that fits this schema."""
        calls = self.calls
        if calls is None or not (must_call or calls.opens or content is not None):
            return None
        rules = [calls.rules(tools, parallel, delimiters), TEXT, GAP]
        opening = delimiters.lark(calls.opens[0]) if calls.opens else ""
        several = parallel and calls.repeats
        if must_call or content is not None:
            more = f" (GAP? {opening} call)*" if several else ""
            start = f"GAP? {opening} call{more}"
            if content is not None:
                rules.append(content_rule("content", content))
                start = f"({start} | GAP? content)"
        else:
            lead, tail = f"TEXT? {opening}", "TEXT"
            if not delimiters.one_token(calls.opens[0]):
                rules.append(lazily("lead", calls.opens[0]))
                lead = "lead"
                # Text after the only call does not begin another one.
                tail = "TEXT" if several else "TAIL"
                again = f"/(.|\\n)*{escaped(calls.opens[0])}(.|\\n)*/"
                rules.append(f"TAIL: TEXT & ~AGAIN\nAGAIN: {again}")
            start = f"({lead} call)* {tail}?" if several else f"({lead} call)? {tail}?"
        rules.append(f"start: {self._thought(rules, delimiters, thinking)}{start}")
        return "\n".join(reversed(rules))

    def _thought(
        self, rules: list[str], delimiters: Delimiters, thinking: bool, gap: str = ""
    ) -> str:
        """Reasoning and then `gap`; nothing, too, unless the prompt has opened it."""
        if self.reasoning is None:
            return ""
        rest = f"TEXT? {delimiters.lark(self.reasoning.close)}"
        if not delimiters.one_token(self.reasoning.close):
            rules.append(lazily("thought", self.reasoning.close))
            rest = "thought"
        rest += gap
        return f"{rest} " if thinking else f"({delimiters.lark(self.reasoning.open)} {rest})? "
