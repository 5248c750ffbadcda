"""`Output`: what a parser has found in an answer since it was last asked."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import NamedTuple

from asyncinfer.chunk import ToolCallDelta
from asyncinfer.tools.source import Source

__all__ = ["MessageDelta", "Output"]


class MessageDelta(NamedTuple):
    """What some text adds to a message."""

    content: str
    reasoning: str
    tool_calls: tuple[ToolCallDelta, ...]

    def then(self, later: MessageDelta) -> MessageDelta:
        """Both deltas as one."""
        content, reasoning, calls = later
        return MessageDelta(
            self.content + content, self.reasoning + reasoning, self.tool_calls + calls
        )


class Output:
    """Takes what a parser finds. White space between the parts of an answer belongs to none of
    them: it is held back until it is known what follows."""

    def __init__(self, source: Source, new_id: Callable[[], str]) -> None:
        """`source` is what the parser reads. `new_id()` names a call that has no name of its
        own."""
        self._source = source
        self._new_id = new_id
        self._content: list[str] = []
        self._reasoning: list[str] = []
        self._parts = self._content
        #: Deltas of calls, whose arguments are kept as lists of pieces.
        self._calls: list[tuple[ToolCallDelta, list[str]]] = []
        self._space = ""
        self._lead = False
        #: White space before the part that begins, and the lists whose text has begun.
        self._gap = ""
        self._begun: set[int] = set()
        self._count = 0
        #: Whether the current call has any arguments yet.
        self._argued = False
        #: Where in the marked text of the answer each stretch of reasoning begins and ends.
        self.thoughts: list[tuple[int, int]] = []

    def content(self, text: str) -> None:
        self._write(self._content, text)

    def reasoning(self, text: str) -> None:
        begin, end = self._source.taken
        if self.thoughts and self.thoughts[-1][1] == begin:
            begin, _ = self.thoughts.pop()
        self.thoughts.append((begin, end))
        self._write(self._reasoning, text)

    def delimiter(self) -> None:
        """Note that a part has ended."""
        self._gap = self._gap or self._space
        self._space, self._lead = "", True

    def reasoning_begins(self) -> None:
        """Begin with reasoning, which the prompt has opened."""
        self._lead = True

    def call(self, name: str, call_id: str | None = None) -> None:
        """Begin a call."""
        self.delimiter()
        named = call_id or self._new_id()
        self._calls.append((ToolCallDelta(self._count, named, name, ""), []))
        self._count += 1
        self._argued = False

    def arguments(self, text: str) -> None:
        """Add to the arguments of the call that began last."""
        if not text:
            return
        self._argued = True
        if not self._calls:
            self._calls.append((ToolCallDelta(self._count - 1, None, None, ""), []))
        self._calls[-1][1].append(text)

    def quoted(self, text: str) -> None:
        """Add a piece of a string value to the arguments, escaped for JSON."""
        self.arguments(json.dumps(text, ensure_ascii=False)[1:-1])

    def call_ends(self) -> None:
        """End the call. Without arguments so far they are an empty object."""
        if not self._argued:
            self.arguments("{}")

    def end(self) -> None:
        """End the answer, and with it release the white space at its end."""
        if self._space:
            self._parts.append(self._space)
            self._space = ""

    def taken(self) -> MessageDelta:
        """What was found since the last call of this method."""
        calls = [call._replace(arguments="".join(pieces)) for call, pieces in self._calls]
        delta = MessageDelta("".join(self._content), "".join(self._reasoning), tuple(calls))
        self._content.clear()
        self._reasoning.clear()
        self._calls.clear()
        return delta

    def _write(self, parts: list[str], text: str) -> None:
        if self._lead:
            begun = text.lstrip()
            self._gap = self._gap or text[: len(text) - len(begun)]
            if not begun:
                return
            # What goes on after another part is no part of the word before it.
            text = (self._gap or "\n") + begun if id(parts) in self._begun else begun
            self._gap, self._lead = "", False
        if text:
            self._begun.add(id(parts))
        self._parts = parts
        bare = text.rstrip()
        if bare:
            parts.append(self._space + bare)
            self._space = text[len(bare) :]
        else:
            self._space += text
