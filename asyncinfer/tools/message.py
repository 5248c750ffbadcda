"""`MessageParser`: the text of an answer becomes content, reasoning and tool calls."""

from __future__ import annotations

import secrets
from collections.abc import Callable, Collection, Generator, Mapping, Sequence
from dataclasses import replace
from typing import Any

from asyncinfer.errors import InvalidRequest
from asyncinfer.structured_output import AnswerFormat
from asyncinfer.text import Detokenizer, Tokenizer
from asyncinfer.tools.delimiters import Delimiters, Detokenizes, MarkingDetokenizer
from asyncinfer.tools.family import ToolFamily
from asyncinfer.tools.lark import Unheld
from asyncinfer.tools.output import MessageDelta, Output
from asyncinfer.tools.schemas import loosened
from asyncinfer.tools.source import Source
from asyncinfer.tools.tool import Tool

__all__ = ["MessageParser", "MessageReader", "message_text", "new_call_id"]

#: Characters of a call's id. Some templates take ids of exactly nine letters and digits.
_LETTERS = "abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789"


def new_call_id() -> str:
    """A new id of nine random letters and digits."""
    return "".join(secrets.choice(_LETTERS) for _ in range(9))


class MessageReader:
    """Reads the answers to one request, and knows the grammar that restricts them."""

    def __init__(
        self,
        family: ToolFamily,
        delimiters: Delimiters,
        tools: tuple[Tool, ...] = (),
        *,
        thinking: bool = False,
        must_call: bool = False,
        parallel: bool = True,
        barred: tuple[str, ...] = (),
    ) -> None:
        """
        Args:
            tools: what an answer may call.
            thinking: the prompt has opened the reasoning.
            must_call: every answer calls.
            parallel: an answer may call more than once.
            barred: what an answer must not write.
        """
        self.family = family
        self.delimiters = delimiters
        self.tools = {tool.name: tool for tool in tools}
        self._thinking = thinking
        self.must_call = must_call
        self._parallel = parallel
        self._barred = barred

    def parser(self, new_id: Callable[[], str] = new_call_id) -> MessageParser:
        """A parser for one of the answers."""
        source = Source(self.delimiters)
        out = Output(source, new_id)
        steps = self.family.read(source, out, self.tools, self._thinking)
        return MessageParser(source, out, steps)

    def barred_ids(self, tokenizer: Tokenizer) -> tuple[tuple[int, ...], ...]:
        """Token sequences that an answer must not write, where it may call nothing."""
        added = tokenizer.added_tokens
        words = [
            ((added[text],),) if text in added else tokenizer.bad_word_ids(text)
            for text in self._barred
        ]
        return tuple(ids for word in words for ids in word)

    def after_reasoning(self, form: AnswerFormat) -> AnswerFormat:
        """The format of answers whose content fits `form`. They may reason before it, and have to
        end the reasoning that the prompt has opened."""
        span, before = self.family.reasoning, self.family.before(self.delimiters, self._thinking)
        closing = span.close if span is not None and self._thinking else ""
        if not before or form.after not in ("", closing):
            return form
        return form._replace(after="", before=before, tokens=frozenset(self.delimiters.marks))

    def loosened(self, names: Collection[str]) -> MessageReader:
        """A reader of the same answers, whose grammar holds the tools of these names to less."""
        tools = tuple(
            replace(tool, schema=loosened(tool.schema)) if tool.name in names else tool
            for tool in self.tools.values()
        )
        return MessageReader(
            self.family,
            self.delimiters,
            tools,
            thinking=self._thinking,
            must_call=self.must_call,
            parallel=self._parallel,
            barred=self._barred,
        )

    def grammar(self, content: Mapping[str, Any] | None = None) -> AnswerFormat | None:
        """The format that makes calls fit their tools; None where any text may be written. With a
        `content` an answer that does not call is JSON that fits this schema.

        Raises `InvalidRequest` for a schema that calls cannot be held to, where they have to be.
        """
        if not self.tools:
            return None
        try:
            rules = self.family.rules(
                tuple(self.tools.values()),
                self.delimiters,
                thinking=self._thinking,
                must_call=self.must_call,
                parallel=self._parallel,
                content=None if self.must_call else content,
            )
        except Unheld as error:
            if not self.must_call and content is None:
                return None
            raise InvalidRequest(f"tools/{error.place}", error.why, _UNHELD) from None
        if rules is None:
            return None
        return AnswerFormat("tools", rules, tokens=frozenset(self.delimiters.marks))


_UNHELD = "calls in this model's syntax cannot be held to it; tool_choice may be 'auto'"


class MessageParser:
    """Reads one answer, with the same result however its text is cut into pieces."""

    def __init__(self, source: Source, out: Output, steps: Generator[None, None, None]) -> None:
        self._source = source
        self._out = out
        self._steps = steps
        next(steps, None)

    def feed(self, text: str) -> MessageDelta:
        """What `text`, which follows all that came before, settles."""
        self._source.add(text)
        next(self._steps, None)
        return self._out.taken()

    @property
    def thoughts(self) -> Sequence[tuple[int, int]]:
        """Where in all text that was fed each stretch of reasoning begins and ends."""
        return self._out.thoughts

    def end(self) -> MessageDelta:
        """What the end of the answer settles."""
        self._source.ended = True
        next(self._steps, None)
        self._out.end()
        return self._out.taken()


def message_text(message: MessageReader | None, detokenizer: Detokenizer) -> Detokenizes:
    """The detokenizer whose text the answer's parser reads."""
    if message is None:
        return detokenizer
    return MarkingDetokenizer(detokenizer, message.delimiters.marks)
