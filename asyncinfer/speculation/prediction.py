"""`Prediction`: an answer that the caller expects, as far as it agrees with the one that comes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from asyncinfer.speculation.packed_tokens import PackedTokens

__all__ = ["Prediction"]

#: After a difference the texts meet again where two tokens are alike nearby, or four anywhere.
_NEAR_RUN: Final = 2
_NEAR: Final = 64
_FAR_RUN: Final = 4


class Prediction:
    """The place of an answer in the expected text."""

    __slots__ = ("_at", "_expected", "_read")

    def __init__(self, expected: PackedTokens) -> None:
        self._expected = expected
        #: Tokens of the answer that were compared.
        self._read = 0
        #: The expected token that comes next.
        self._at = 0

    def following(self, answer: Sequence[int], most: int) -> list[int]:
        """The tokens expected after `answer`, whose beginning is that of the last call; `most` at
        most, none where the two do not agree."""
        new = answer[self._read :]
        agreed = self._expected.slice(self._at, self._at + len(new)) == list(new)
        place = self._at + len(new) if agreed else self._meeting(answer)
        if place < 0:
            return []
        self._read, self._at = len(answer), place
        return self._expected.slice(place, place + most)

    def _meeting(self, answer: Sequence[int]) -> int:
        """Where the expected text goes on after the run that the answer ends with; -1 where no run
        is found."""
        expected, whole = self._expected, len(self._expected)
        near = min(whole, self._at + _NEAR)
        for length, start, end in ((_NEAR_RUN, self._at, near), (_FAR_RUN, 0, whole)):
            run = answer[-length:]
            if len(run) == length and (at := expected.first(run, start, end)) >= 0:
                return at + length
        return -1
