"""`StopStrings`: ends a text before the first stop string, holding back what could begin one."""

from __future__ import annotations

from array import array
from collections.abc import Iterable
from sys import getsizeof
from typing import Final, Protocol

__all__ = ["StopChain", "StopStrings", "TextStop"]


#: Bytes of a `_Matcher` with its number; of a `_Borders` with its array; and of each of the array's
#: entries, with its share of those that are not used yet.
_MATCHER: Final = 128
_BORDERS: Final = 256
_ENTRY: Final = 5


class TextStop(Protocol):
    """Watches the text of one sequence, and ends it early."""

    def push(self, text: str, ends: bool = True) -> tuple[str, str | None]:
        """See `StopStrings.push`."""

    def flush(self) -> str:
        """See `StopStrings.flush`."""


class StopChain:
    """Ends a text where either of two `TextStop`s does, whichever comes first."""

    __slots__ = ("_first", "_second")

    def __init__(self, first: TextStop, second: TextStop) -> None:
        self._first = first
        self._second = second

    def push(self, text: str, ends: bool = True) -> tuple[str, str | None]:
        text, found = self._first.push(text, ends)
        shown, earlier = self._second.push(text, ends)
        if found and not earlier:
            shown += self._second.flush()
        return shown, earlier or found

    def flush(self) -> str:
        shown, found = self._second.push(self._first.flush())
        return shown if found else shown + self._second.flush()


class StopStrings:
    """Watches the text of one sequence for stop strings.

    As soon as a stop string is complete, the text ends before the earliest complete one. Until then
    the longest suffix that could begin one is held back, and no more than that.
    """

    __slots__ = ("_held", "_include", "_matchers")

    def __init__(self, stops: tuple[str, ...], *, include: bool = False) -> None:
        """`stops` are not empty strings (`SamplingParams` has checked them). `include`: show the
        one that ends the text, too."""
        self._begin((_Borders(stop) for stop in stops), include)

    def another(self) -> StopStrings:
        """Watches another text for the same strings. The two share their tables, which grow with
        the texts, so one thread at a time may push to either."""
        made = StopStrings(())
        made._begin((each.borders for each in self._matchers), self._include)
        return made

    @staticmethod
    def held_bytes(stops: tuple[str, ...], texts: int) -> int:
        """Bytes at most that watching so many texts takes, with what is held back of them."""
        longest = max(map(getsizeof, stops), default=0)
        tables = sum(_BORDERS + getsizeof(stop) + _ENTRY * len(stop) for stop in stops)
        return tables + texts * (longest + _MATCHER * len(stops))

    def _begin(self, borders: Iterable[_Borders], include: bool) -> None:
        self._matchers = [_Matcher(each) for each in borders]
        self._include = include
        self._held = ""

    def push(self, text: str, ends: bool = True) -> tuple[str, str | None]:
        """`(text safe to show, the stop string that was found)`. Not to be called after a match.
        Unless `ends`, a stop string that `text` completes does not count; one that only begins in
        it still may."""
        held = len(self._held)
        match, waiting, stop = -1, 0, ""
        for matcher in self._matchers:
            end = matcher.feed(text) if ends else matcher.skip(text)
            if end >= 0:
                start = held + end - len(matcher.stop)
                if match < 0 or start < match:
                    match, stop = start, matcher.stop
            elif matcher.depth > waiting:
                waiting = matcher.depth
        if held:
            text = self._held + text
            self._held = ""
        if match >= 0:
            return text[: match + len(stop) if self._include else match], stop
        if waiting:
            self._held = text[-waiting:]
            text = text[:-waiting]
        return text, None

    def flush(self) -> str:
        """What was held back: the text ended without a stop string."""
        held, self._held = self._held, ""
        return held


class _Matcher:
    """Knuth, Morris and Pratt (1977) for one string: constant work per character."""

    __slots__ = ("borders", "depth", "stop")

    def __init__(self, borders: _Borders) -> None:
        self.borders = borders
        self.stop = borders.stop
        #: Characters at the end of the text so far that begin `stop`.
        self.depth = 0

    def feed(self, text: str) -> int:
        """Where in `text` the first match ends, or -1."""
        stop, depth = self.stop, self.depth
        if not depth and stop[0] not in text:
            return -1
        for at, char in enumerate(text, 1):
            while depth and stop[depth] != char:
                depth = self.borders.of(depth)
            if stop[depth] == char:
                depth += 1
                if depth == len(stop):
                    return at
        self.depth = depth
        return -1

    def skip(self, text: str) -> int:
        """`feed`, but past every match."""
        while (end := self.feed(text)) >= 0:
            self.depth = self.borders.of(len(self.stop))
            text = text[end:]
        return end


class _Borders:
    """The table of Knuth, Morris and Pratt for one string. It is built only as deep as a match has
    gone."""

    __slots__ = ("_lengths", "stop")

    def __init__(self, stop: str) -> None:
        self.stop = stop
        self._lengths = array("I", [0, 0])

    def of(self, length: int) -> int:
        """The length of the longest proper prefix of `stop[:length]` that also ends it."""
        stop, lengths = self.stop, self._lengths
        while len(lengths) <= length:
            last = stop[len(lengths) - 1]
            border = lengths[-1]
            while border and stop[border] != last:
                border = lengths[border]
            lengths.append(border + 1 if stop[border] == last else 0)
        return lengths[length]
