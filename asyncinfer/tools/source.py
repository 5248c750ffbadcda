"""`Source`: the text of an answer as it comes, for parsers written as generators.

A parser that needs more text yields, and goes on where it was when there is more. What it hands on
does not depend on how the text was cut.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Generator
from typing import Final, TypeVar

from asyncinfer.tools.delimiters import Delimiters

__all__ = ["Parsing", "Put", "Source"]

T = TypeVar("T")
#: A parser: it yields where it waits for text.
Parsing = Generator[None, None, T]
Put = Callable[[str], object]

_IN_STRING: Final = re.compile(r'["\\\ud800-\udfff]')
_OUTSIDE: Final = re.compile(r'["{}\[\]\ud800-\udfff]')
_SCALAR_END: Final = re.compile(r"[\s,:}\])\ud800-\udfff]")


class Source:
    """Text, with a mark for each token that is a delimiter: see `Delimiters`.

    A method that puts text puts it as soon as it is settled, without marks: it holds back no more
    than what may become one of the delimiters it looks for.
    """

    def __init__(self, delimiters: Delimiters) -> None:
        self.delimiters = delimiters
        #: Whether nothing comes any more.
        self.ended = False
        self._text = ""
        self._at = 0
        #: Characters before `_text`, and those of the last `take`.
        self._before = self._last = 0
        #: What was taken since `record`; None where nobody records.
        self._record: list[str] | None = None

    def add(self, text: str) -> None:
        self._text = self._text[self._at :] + text
        self._before += self._at
        self._at = 0

    @property
    def taken(self) -> tuple[int, int]:
        """Where in the marked text of the answer the last `take` began and ended."""
        end = self._before + self._at
        return end - self._last, end

    def record(self) -> None:
        """Keep what is taken from now on, for `recorded`."""
        self._record = []

    def recorded(self) -> str:
        """End recording; returns what was taken since `record`, marks included."""
        taken, self._record = "".join(self._record or ()), None
        return taken

    def no_call(self, opened: str = "") -> str:
        """`recorded` as content, after the opening before it: it turned out to be no call."""
        return self.delimiters.shown(self.delimiters.spelled(opened) + self.recorded())

    def next(self) -> Parsing[str]:
        """The next character, which is not taken; empty at the end."""
        while self._at >= len(self._text) and not self.ended:
            yield
        return self._text[self._at : self._at + 1]

    def take(self, count: int = 1) -> str:
        """Take `count` characters, which must be there."""
        taken = self._text[self._at : self._at + count]
        self._at += count
        self._last = count
        if self._record is not None:
            self._record.append(taken)
        return taken

    def space(self) -> Parsing[None]:
        """Take white space."""
        while (char := (yield from self.next())) and char.isspace():
            self.take()

    def literal(self, text: str) -> Parsing[bool]:
        """Take `text` if it comes next."""
        wanted = self.delimiters.spelled(text)
        while True:
            there = self._text[self._at : self._at + len(wanted)]
            if there == wanted:
                self.take(len(wanted))
                return True
            if self.ended or not wanted.startswith(there):
                return False
            yield

    def until(self, stops: tuple[str, ...], put: Put) -> Parsing[str | None]:
        """Put the text before the first of `stops`, take that, and give it; None where the text
        ended before. Where two begin at one place, the one named first counts."""
        spelled = {self.delimiters.spelled(stop): stop for stop in stops}
        pattern = re.compile("|".join(map(re.escape, spelled))) if spelled else None
        while True:
            found = pattern.search(self._text, self._at) if pattern is not None else None
            if found is not None:
                put(self.delimiters.shown(self.take(found.start() - self._at)))
                self.take(len(found[0]))
                return spelled[found[0]]
            if self.ended:
                put(self.delimiters.shown(self.take(len(self._text) - self._at)))
                return None
            held = _held(self._text, self._at, spelled)
            if ready := len(self._text) - self._at - held:
                put(self.delimiters.shown(self.take(ready)))
            yield

    def before(self, chars: str, put: Put) -> Parsing[None]:
        """Put the text before one of `chars` or a delimiter that is a token."""
        while (char := (yield from self.next())) and char not in chars:
            if "\ud800" <= char <= "\udfff":
                return
            put(self.take())

    def json(self, put: Put) -> Parsing[bool]:
        """Put one JSON value as it stands; False where it ended unfinished. A delimiter that is a
        token ends it, also within a string."""
        first = yield from self.next()
        if not first:
            return False
        if first not in '"{[':
            return (yield from self._scalar(put))
        depth, string = 0, False
        while True:
            if not (yield from self.next()):
                return False
            found = (_IN_STRING if string else _OUTSIDE).search(self._text, self._at)
            if found is None:
                put(self.take(len(self._text) - self._at))
                continue
            if before := found.start() - self._at:
                put(self.take(before))
            char = found[0]
            if "\ud800" <= char <= "\udfff":
                return False
            if char == "\\":
                while len(self._text) - self._at < 2 and not self.ended:
                    yield
                put(self.delimiters.shown(self.take(2)))
                continue
            put(self.take())
            if char == '"':
                string = not string
            elif not string:
                depth += 1 if char in "{[" else -1
            if depth <= 0 and not string:
                return True

    def _scalar(self, put: Put) -> Parsing[bool]:
        found = False
        while (yield from self.next()):
            end = _SCALAR_END.search(self._text, self._at)
            count = (len(self._text) if end is None else end.start()) - self._at
            if count:
                put(self.take(count))
                found = True
            if end is not None:
                return found
        return False


def _held(text: str, start: int, stops: dict[str, str]) -> int:
    """Characters at the end of `text` that may begin one of `stops`."""
    most = max(map(len, stops), default=1) - 1
    for at in range(max(start, len(text) - most), len(text)):
        tail = text[at:]
        if any(stop.startswith(tail) for stop in stops):
            return len(tail)
    return 0
