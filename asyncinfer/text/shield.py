"""`Shield`: a chat message stays text, even if it spells a control token.

A template writes `<|im_end|>` around messages, and a message that contains `<|im_end|>` must not
end itself and go on as the system. So before the caller's text is joined with the template's, a
mark is put into everything that would be read as a special token, and the rendered text is
tokenised piece by piece between marks. The mark is half of a surrogate pair, which no valid text
holds, so nobody else can have written it.

A token can also arise where two texts meet, such as a `<` of the template and a name `|im_end|>`. A
text that ends like the beginning of a token, begins like the end of one or lies inside one gets a
mark at both ends. Marks that turn out to be inside no token are ignored.

Some tokenizers look for special tokens in the normalised text, for example in lower case. Which
characters became the token is not known then, so such a text gets a mark after each character.

Some models separate messages by tokens that are not special. Those that a template names are
covered as well, except in the assistant's messages, where a `</think>` is meant.
"""

from __future__ import annotations

import re
from bisect import bisect_right
from collections import Counter
from collections.abc import Callable, Mapping
from itertools import groupby, pairwise
from typing import Final

from asyncinfer.errors import InvalidRequest

__all__ = ["MARK", "Shield", "check_text"]

MARK: Final = "\udcff"
#: Levels of the pattern; few words have so long a common beginning that they are still together.
_DEEPEST: Final = 20


class Shield:
    """Knows the special tokens of one tokenizer. Immutable; safe from any thread."""

    def __init__(
        self,
        special: Mapping[str, bool],
        normalise: Callable[[str], str] = str,
        others: Mapping[str, bool] | None = None,
    ) -> None:
        """`special` are the tokens to cover, each with whether the tokenizer looks for it,
        normalised, in the text that `normalise` makes. `others` are the tokens that `naming` may
        add."""
        self._special = special
        self._normalise = normalise
        self._others = others or {}
        # A token of one character has no inside to put a mark.
        words = sorted(token for token in special if len(token) > 1)
        self._word = re.compile(_any_of(words)) if words else None
        self._edges = _Edges(words)
        made = sorted({normalise(token) for token in words if special[token]} - {""})
        self._made = re.compile(_any_of(made)) if made else None
        self._made_edges = _Edges([token for token in made if len(token) > 1])
        #: Every token that a mark can be in.
        self._tokens = _Edges([token for token in (*special, *self._others) if len(token) > 1])

    def naming(self, *templates: str | None) -> Shield:
        """A shield that also covers the other tokens that one of these templates names."""
        text = "\n".join(source for source in templates if source is not None)
        # Tokens of whitespace occur in every template's indentation.
        named = {
            token: normalised
            for token, normalised in self._others.items()
            if token.strip() and token in text
        }
        return Shield({**self._special, **named}, self._normalise) if named else self

    def words(self, text: str) -> set[str]:
        """The special tokens that a text spells."""
        return set() if self._word is None else set(self._word.findall(text))

    def mark(self, text: str) -> str:
        """`text` with marks, so that no special token is read in it, or across its ends."""
        marked = text if self._word is None else self._broken(text, self._word.search)
        if self._made is not None:
            search, normalise = self._made.search, self._normalise
            if any(search(normalise(piece)) for piece in marked.split(MARK)):
                return MARK.join(text)
            if self._made_edges.touch(normalise(text)):
                return f"{MARK}{marked}{MARK}"
        return f"{MARK}{marked}{MARK}" if self._edges.touch(text) else marked

    def guarded(self, before: str, after: str) -> str:
        """`after`, which a template made of `before`, a text that is the caller's in part. A change
        of case or a removal may not make new tokens: if there are more than before, all are broken
        by marks."""
        if self._word is None or self._word.search(after) is None:
            return after
        more = Counter(self._word.findall(after)) - Counter(self._word.findall(before))
        return self._broken(after, self._word.search) if more else after

    @staticmethod
    def _broken(text: str, search: Callable[[str, int], re.Match[str] | None]) -> str:
        """`text` with a mark after the first character of each word, overlapping ones included."""
        found = search(text, 0)
        if found is None:
            return text
        parts, at = [], 0
        while found is not None:
            start, at = at, found.start() + 1
            parts.append(text[start:at])
            found = search(text, at)
        return MARK.join([*parts, text[at:]])

    def pieces(self, text: str) -> list[str]:
        """`text` cut at its marks that are inside a token, to be tokenised piece by piece."""
        if MARK not in text:
            return [text]
        parts = text.split(MARK)
        if self._made is not None:
            return parts
        clean, at, cuts = "".join(parts), 0, [0]
        for part in parts[:-1]:
            at += len(part)
            if at > cuts[-1] and self._tokens.reach_over(clean, at):
                cuts.append(at)
        return [clean[start:end] for start, end in pairwise([*cuts, len(clean)])]


class _Edges:
    """The beginnings, insides and ends of words, to tell whether a text could be part of one."""

    def __init__(self, words: list[str]) -> None:
        self._words = frozenset(words)
        self._sorted = sorted(words)
        self._reversed = sorted(word[::-1] for word in words)
        self._lengths = sorted({len(word) for word in words}, reverse=True)
        self._most = max(self._lengths, default=1) - 1
        self._inner = "\0".join(words)
        self._first = _one_of({word[0] for word in words})
        self._last = _one_of({word[-1] for word in words})

    def touch(self, text: str) -> bool:
        """Whether `text` and a text before or after it could form a word."""
        if not text or not self._most:
            return False
        if len(text) <= self._most and text in self._inner:
            return True
        tail, head = text[-self._most :], text[: self._most]
        for first in self._first.finditer(tail):
            if _begins_one(self._sorted, tail[first.start() :]):
                return True
        for last in self._last.finditer(head):
            if _begins_one(self._reversed, head[last.start() :: -1]):
                return True
        return False

    def reach_over(self, text: str, at: int) -> bool:
        """Whether a word of `text` begins before `at` and ends after it."""
        for first in self._first.finditer(text, max(0, at - self._most), at):
            start = first.start()
            for length in self._lengths:
                if start + length <= at:
                    break
                # Shorter at the end of the text.
                word = text[start : start + length]
                if len(word) == length and word in self._words:
                    return True
        return False


def _begins_one(words: list[str], text: str) -> bool:
    """Whether one of the sorted words begins with `text` and is longer."""
    at = bisect_right(words, text)
    return at < len(words) and words[at].startswith(text)


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


def _one_of(characters: set[str]) -> re.Pattern[str]:
    return re.compile(f"[{''.join(map(re.escape, sorted(characters)))}]" if characters else "(?!)")


def _any_of(words: list[str], depth: int = 0) -> str:
    """A pattern for any of the sorted words, as a tree that reads each character once, since models
    have thousands of special tokens."""
    if depth == _DEEPEST:
        return f"(?:{'|'.join(map(re.escape, words))})"
    branches = []
    for _, group in groupby(words, lambda word: word[0]):
        alike = list(group)
        stem = _common(alike[0], alike[-1])
        # A word that ends here matches before any that goes on.
        ended = alike[0] == stem
        rest = "" if ended else _any_of([word[len(stem) :] for word in alike], depth + 1)
        branches.append(re.escape(stem) + rest)
    return f"(?:{'|'.join(branches)})"


def _common(first: str, last: str) -> str:
    """The common beginning of two words, and so of all that are sorted between them."""
    pairs = enumerate(zip(first, last, strict=False))
    return first[: next((at for at, (a, b) in pairs if a != b), len(first))]
