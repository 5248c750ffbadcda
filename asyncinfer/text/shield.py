"""`Shield`: what a user says in a chat stays text, also where it spells a control token.

A template writes `<|im_end|>` around the messages; a message that says `<|im_end|>` must not end
itself and speak on as the system. So where the caller's text meets the template's, a mark goes into
everything that would be read as a special token, and a rendered text is tokenised mark by mark. The
mark is half a surrogate pair, which no text may hold, so that nobody else can have written it.

A token can also be put together: from a `<` of the template's and a name `|im_end|>`, say. What
ends like the beginning of a token, begins like an end or lies within one has a mark at both ends.
Most such marks turn out to be in no token, and then they count for nothing.

Some tokenizers look for a special token in what they make of a text, in lower case say. There is no
telling which characters became one: such a text gets a mark after each.

Some models part their messages by tokens that are not marked special: those that a template names
are covered too, but for what the assistant said, whose `</think>` is meant.
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
        self._word = re.compile(_any_of(words)) if words else None
        self._edges = _Edges(words)
        made = sorted({normalise(token) for token in words if special[token]} - {""})
        self._made = re.compile(_any_of(made)) if made else None
        self._made_edges = _Edges([token for token in made if len(token) > 1])
        #: Every token that a mark can be in.
        self._tokens = _Edges([token for token in (*special, *self._others) if len(token) > 1])

    def naming(self, *templates: str | None) -> Shield:
        """One that also covers the tokens that one of these templates names."""
        text = "\n".join(source for source in templates if source is not None)
        # Indentation names nothing, and some tokenizers have tokens for it.
        named = {its: how for its, how in self._others.items() if its.strip() and its in text}
        return Shield({**self._special, **named}, self._normalise) if named else self

    def mark(self, text: str) -> str:
        """`text` with marks, in which no special token can be read, nor in what it is put
        together with."""
        marked = text if self._word is None else self._broken(text, self._word.search)
        if self._made is not None:
            search, normalise = self._made.search, self._normalise
            if any(search(normalise(piece)) for piece in marked.split(MARK)):
                return MARK.join(text)
            if self._made_edges.touch(normalise(text)):
                return f"{MARK}{marked}{MARK}"
        return f"{MARK}{marked}{MARK}" if self._edges.touch(text) else marked

    def guarded(self, before: str, after: str) -> str:
        """`after`, which a template made of `before`, a text that is the caller's in part. In other
        letters, or with something left out, it must not hold tokens that were not there: those
        are broken, and all others with them."""
        if self._word is None or self._word.search(after) is None:
            return after
        more = Counter(self._word.findall(after)) - Counter(self._word.findall(before))
        return self._broken(after, self._word.search) if more else after

    @staticmethod
    def _broken(text: str, search: Callable[[str, int], re.Match[str] | None]) -> str:
        """`text` with a mark behind the first character of each word, of overlapping ones too."""
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
        """`text` cut at those of its marks that are within a token: to be tokenised one by one."""
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
    """What texts can have in common with words that they do not hold."""

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
        """Whether a word can be put together from `text` and what comes before or after."""
        if not text or not self._most:
            return False
        if len(text) <= self._most and text in self._inner:
            return True
        tail, head = text[-self._most :], text[: self._most]
        for its in self._first.finditer(tail):
            if _begins_one(self._sorted, tail[its.start() :]):
                return True
        for its in self._last.finditer(head):
            if _begins_one(self._reversed, head[its.start() :: -1]):
                return True
        return False

    def reach_over(self, text: str, at: int) -> bool:
        """Whether a word of `text` begins before `at` and ends after it."""
        for its in self._first.finditer(text, max(0, at - self._most), at):
            start = its.start()
            for length in self._lengths:
                if start + length <= at:
                    break
                # At the end of the text it may be cut short.
                word = text[start : start + length]
                if len(word) == length and word in self._words:
                    return True
        return False


def _begins_one(words: list[str], text: str) -> bool:
    """Whether one of the sorted words goes on after `text`."""
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
