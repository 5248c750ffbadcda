"""`Delimiters`: the texts by which a family marks the parts of an answer, matched by token.

Where a delimiter is a token of its own, the detokenizer writes a mark for it: a surrogate, which no
text holds. So text that merely spells the delimiter stays text, and a special token, which adds no
text, can be a delimiter.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable
from typing import Final, Protocol

from asyncinfer.text import Tokenizer

__all__ = ["FURTHER_MARKS", "Delimiters", "Detokenizes", "MarkingDetokenizer"]

_FIRST: Final = 0xD800
#: How many marks there are.
_MOST: Final = 0x400
#: The first of as many marks beside these.
FURTHER_MARKS: Final = _FIRST + _MOST


class Detokenizes(Protocol):
    """What turns the tokens of an answer into its text."""

    def push(self, token_id: int) -> str: ...

    def flush(self) -> str: ...


class Delimiters:
    """The delimiters of one family with one tokenizer. Immutable; safe from any thread.

    `first` is the first mark; texts with the marks of two objects need other ones of each.
    """

    def __init__(self, tokenizer: Tokenizer, texts: Iterable[str], first: int = _FIRST) -> None:
        written = "\n".join(texts)
        added = tokenizer.added_tokens
        found = sorted((text for text in added if text.strip() and text in written), key=len)
        tokens = found[::-1][:_MOST]
        #: Token id -> mark.
        self.marks: dict[int, str] = {added[text]: chr(first + i) for i, text in enumerate(tokens)}
        self._spelled = {text: self.marks[added[text]] for text in tokens}
        self._ids = {text: added[text] for text in tokens}
        self._shown = {
            ord(mark): "" if added[text] in tokenizer.special_ids else text
            for text, mark in self._spelled.items()
        }
        self._texts = {ord(mark): text for text, mark in self._spelled.items()}
        self._any = re.compile("|".join(map(re.escape, tokens))) if tokens else None

    def spelled(self, text: str) -> str:
        """How a marked text spells a delimiter."""
        if self._any is None:
            return text
        return self._any.sub(lambda found: self._spelled[found[0]], text)

    def unmarked(self, text: str) -> str:
        """A marked text with each delimiter in the place of its mark."""
        return text if text.isascii() else text.translate(self._texts)

    def shown(self, text: str) -> str:
        """A marked text for people: a mark becomes its delimiter, or nothing for a special
        token."""
        return text if text.isascii() else text.translate(self._shown)

    def lark(self, text: str) -> str:
        """A delimiter in Lark's syntax."""
        if self._any is None:
            return json.dumps(text)
        parts, at = [], 0
        for found in self._any.finditer(text):
            if found.start() > at:
                parts.append(json.dumps(text[at : found.start()]))
            parts.append(f"<[{self._ids[found[0]]}]>")
            at = found.end()
        if at < len(text):
            parts.append(json.dumps(text[at:]))
        return " ".join(parts)

    def one_token(self, text: str) -> bool:
        """Whether the delimiter is exactly one token."""
        return text in self._ids

    def stops(self, stop: tuple[str, ...]) -> tuple[str, ...]:
        """A request's stop strings, for a marked text."""
        spelled = ((text, self.spelled(text)) for text in stop)
        return stop + tuple(marked for text, marked in spelled if marked != text)


class MarkingDetokenizer:
    """A detokenizer that writes marks for delimiters."""

    __slots__ = ("_inner", "_marks")

    def __init__(self, inner: Detokenizes, marks: dict[int, str]) -> None:
        self._inner = inner
        self._marks = marks

    def push(self, token_id: int) -> str:
        """What the token adds to the text."""
        mark = self._marks.get(token_id)
        return self._inner.push(token_id) if mark is None else self._inner.flush() + mark

    def flush(self) -> str:
        """What is still held back, as the end of the text."""
        return self._inner.flush()
