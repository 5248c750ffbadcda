"""`LoopDetector`: finds an answer that repeats itself."""

from __future__ import annotations

from collections import deque

__all__ = ["LoopDetector"]


class LoopDetector:
    """Finds at most `tokens` tokens that come `times` times in a row. A token costs as many
    comparisons as it occurs among the last `tokens` ones."""

    __slots__ = ("_count", "_places", "_runs", "_times", "_tokens")

    def __init__(self, tokens: int, times: int) -> None:
        self._tokens = tokens
        self._times = times
        self._count = 0
        #: By token: its places among the last `tokens` ones, in order.
        self._places: dict[int, deque[int]] = {}
        #: By distance: how many of the last tokens in a row equal the token that far before them.
        self._runs: dict[int, int] = {}

    def push(self, token: int) -> bool:
        """Add the next token. Returns whether a loop is complete with it."""
        now, runs = self._count, self._runs
        places = self._places.setdefault(token, deque())
        while places and now - places[0] > self._tokens:
            places.popleft()
        self._runs = {now - place: runs.get(now - place, 0) + 1 for place in places}
        places.append(now)
        self._count = now + 1
        if not self._count % (4 * self._tokens):
            self._forget()
        rest = self._times - 1
        return any(run >= distance * rest for distance, run in self._runs.items())

    def _forget(self) -> None:
        """Drop tokens that no longer matter, so that a long answer keeps no more than a short
        one."""
        first = self._count - self._tokens
        self._places = {token: at for token, at in self._places.items() if at[-1] >= first}
