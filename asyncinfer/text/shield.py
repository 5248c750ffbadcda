"""`Shield`: what a user says in a chat stays text, also where it spells a control token.

A template writes `<|im_end|>` around the messages; a message that says `<|im_end|>` must not end
itself and speak on as the system. So before the template sees it, a mark goes into everything in a
message that would be read as a special token, and a rendered text is tokenised mark by mark. The
mark is half a surrogate pair, which no text may hold, so that nobody else can have written it.

Some tokenizers look for a special token in what they make of a text, in lower case say. There is no
telling which characters became one: such a text gets a mark after each.

Some models part their messages by tokens that are not marked special: those that a template names
are covered too, but for what the assistant said, whose `</think>` is meant.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from itertools import groupby
from typing import Any, Final

from asyncinfer.errors import InvalidRequest

__all__ = ["Shield", "check_text"]

_MARK: Final = "\udcff"
#: Forks of the pattern inside one another; any words are few enough below that.
_DEEPEST: Final = 20


class Shield:
    """Knows the special tokens of one tokenizer. Immutable; safe from any thread."""

    def __init__(
        self,
        special: Mapping[str, bool],
        normalise: Callable[[str], str] = str,
        others: Mapping[str, bool] | None = None,
    ) -> None:
        """`special` are the tokens to cover; of each, whether it is looked for, itself normalised,
        in what `normalise` makes of a text. `others` are those that `naming` may add."""
        self._special = special
        self._normalise = normalise
        self._others = others or {}
        # A token of one character has no inside to put a mark.
        words = sorted(token for token in special if len(token) > 1)
        self._begins = re.compile(rf"(?={_any_of(words)})(.)", re.DOTALL) if words else None
        made = sorted({normalise(token) for token in words if special[token]} - {""})
        self._made = re.compile(_any_of(made)) if made else None

    def naming(self, *templates: str | None) -> Shield:
        """One that also covers the tokens that one of these templates names."""
        text = "\n".join(source for source in templates if source is not None)
        # Indentation names nothing, and some tokenizers have tokens for it.
        named = {its: how for its, how in self._others.items() if its.strip() and its in text}
        return Shield({**self._special, **named}, self._normalise) if named else self

    def cover(self, where: str, value: Any) -> Any:
        """A copy of JSON-like `value` in which no text, and no name, holds a special token. Raises
        `InvalidRequest` for a lone surrogate, naming the place."""
        if isinstance(value, str):
            check_text(where, value)
            return self._marked(value)
        if isinstance(value, dict):
            return {self.cover(where, k): self.cover(f"{where}.{k}", v) for k, v in value.items()}
        if isinstance(value, list):
            return [self.cover(f"{where}[{index}]", item) for index, item in enumerate(value)]
        return value

    def _marked(self, text: str) -> str:
        covered = text if self._begins is None else self._begins.sub(rf"\1{_MARK}", text)
        if self._made is None:
            return covered
        search, normalise = self._made.search, self._normalise
        hidden = any(search(normalise(piece)) for piece in self.pieces(covered))
        return _MARK.join(text) if hidden else covered

    @staticmethod
    def pieces(text: str) -> list[str]:
        """`text` cut at its marks: to be tokenised one by one, and joined."""
        return text.split(_MARK)


def check_text(field: str, text: str) -> None:
    """Raise `InvalidRequest` naming the offset if `text` cannot be written as UTF-8."""
    if text.isascii():
        return
    try:
        text.encode("utf-8")
    except UnicodeEncodeError as error:
        raise InvalidRequest(
            field,
            text[max(0, error.start - 8) : error.start + 8],
            f"lone surrogate {text[error.start]!r} at offset {error.start}; must be valid Unicode",
        ) from None


def _any_of(words: list[str], depth: int = 0) -> str:
    """A pattern for any of the sorted words that looks at a character once: there are models with
    thousands of special tokens."""
    if depth == _DEEPEST:
        return f"(?:{'|'.join(map(re.escape, words))})"
    branches = []
    for _, group in groupby(words, lambda word: word[0]):
        alike = list(group)
        stem = _common(alike[0], alike[-1])
        # Where a word ends, that another goes on does not matter.
        ended = alike[0] == stem
        rest = "" if ended else _any_of([word[len(stem) :] for word in alike], depth + 1)
        branches.append(re.escape(stem) + rest)
    return f"(?:{'|'.join(branches)})"


def _common(first: str, last: str) -> str:
    """What two words begin with, and so all that are sorted in between."""
    pairs = enumerate(zip(first, last, strict=False))
    return first[: next((at for at, (a, b) in pairs if a != b), len(first))]
