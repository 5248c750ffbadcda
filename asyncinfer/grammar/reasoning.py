"""`Reasoning`: ends the reasoning of an answer when its budget is spent."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Final

__all__ = ["Reasoning"]

#: An answer opens its reasoning within so many of its first tokens, or does not reason.
_OPENS_WITHIN: Final = 8
#: Tokens beyond the budget that may end a character, or a closing tag that has begun.
_GRACE: Final = 8
#: Tokens at the end of the prompt that may write the opening tag and white space after it.
_PROMPT_TAIL: Final = 80


class Reasoning:
    """Is told the tokens of one answer in order, and returns those that close the reasoning when
    its budget is spent. The state belongs to a sequence, so that a preemption changes nothing.

    Args:
        budget: tokens of the reasoning, after its opening tag.
        opening, closing: the tags, as bytes that tokens add up to.
        closing_ids: tokens that write the closing tag.
        bytes_of: what a token adds to these bytes, a special tag included.
    """

    __slots__ = (
        "_budget",
        "_bytes_of",
        "_closing",
        "_closing_ids",
        "_count",
        "_left",
        "_opening",
        "_tail",
    )

    def __init__(
        self,
        budget: int,
        opening: bytes,
        closing: bytes,
        closing_ids: Sequence[int],
        bytes_of: Callable[[int], bytes],
    ) -> None:
        self._budget = budget
        self._opening = opening
        self._closing = closing
        self._closing_ids = tuple(closing_ids)
        self._bytes_of = bytes_of
        #: The last bytes, of no more tokens than a tag may have.
        self._tail = b""
        #: Tokens of the answer.
        self._count = 0
        #: Tokens that are left of the budget; None while there is no reasoning.
        self._left: int | None = None

    @property
    def over(self) -> bool:
        """Whether no token will be appended any more."""
        return self._left is None and self._count >= _OPENS_WITHIN

    def begin(self, prompt_ids: Sequence[int]) -> None:
        """Read the prompt: where it ends with the opening tag, the reasoning is open from the
        start."""
        end = b"".join(map(self._bytes_of, prompt_ids[-_PROMPT_TAIL:])).rstrip()
        if end.endswith(self._opening):
            self._left = self._budget

    def accept(self, token: int) -> Sequence[int]:
        """Note the answer's next token. Returns the tokens that have to follow it."""
        if self.over:
            return ()
        was_open = self._left is not None
        self._read(token)
        if self._left is None or not was_open:
            return ()
        self._left -= 1
        unfinished = self._left > -_GRACE and (self._closes() or _within_character(self._tail))
        if self._left > 0 or unfinished:
            return ()
        self._left = None
        # The reasoning does not open again.
        self._count = max(self._count, _OPENS_WITHIN)
        return self._closing_ids

    def _read(self, token: int) -> None:
        self._count += 1
        self._tail += self._bytes_of(token)
        closed = self._tail.rfind(self._closing)
        opened = self._tail.rfind(self._opening)
        if closed > opened:
            self._left = None
            self._count = max(self._count, _OPENS_WITHIN)
        elif opened >= 0 and self._left is None:
            self._left = self._budget
        self._tail = self._tail[-max(len(self._opening), len(self._closing), 4) :]

    def _closes(self) -> bool:
        """Whether the text ends within a closing tag, which the next token may complete."""
        return any(self._tail.endswith(self._closing[:n]) for n in range(1, len(self._closing)))


def _within_character(data: bytes) -> bool:
    """Whether bytes of UTF-8 end before their last character does."""
    for count in range(1, min(3, len(data)) + 1):
        byte = data[-count]
        if byte >= 0xC0:
            return count < (2 if byte < 0xE0 else 3 if byte < 0xF0 else 4)
        if byte < 0x80:
            return False
    return False
