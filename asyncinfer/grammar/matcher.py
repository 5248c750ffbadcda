"""`Matcher`: how far one answer has come in what it has to fit."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Final

from asyncinfer.errors import RequestFailed
from asyncinfer.grammar.counters import GrammarCounters
from asyncinfer.grammar.matcher_size import matcher_size

if TYPE_CHECKING:
    from llguidance import LLExecutor, LLMatcher

__all__ = ["Matcher"]

#: The fewest tokens between two measurements of a matcher's size.
MEASURED: Final = 64


class Matcher:
    """Is told the tokens of one answer in order. It belongs to a sequence and not to a slot, so
    that a preemption changes nothing. Decode thread only.

    Args:
        field: the option that asks for the format, for errors.
        state: the library's matcher, at the start of its grammar and this object's own.
        executor: fills the masks of several matchers at once.
        words: 32-bit words of a mask.
        most_forced: tokens that may be forced at a time; 0 has every token drawn.
    """

    __slots__ = (
        *("_due", "counters", "executor", "field", "most_forced", "size", "state", "tokens"),
        "words",
    )

    def __init__(
        self,
        field: str,
        state: LLMatcher,
        executor: LLExecutor,
        words: int,
        counters: GrammarCounters,
        most_forced: int,
    ) -> None:
        self.field = field
        self.state = state
        self.executor = executor
        self.words = words
        self.counters = counters
        self.most_forced = most_forced
        #: Tokens taken, and bytes at the last measurement.
        self.tokens = self.size = 0
        self._due = MEASURED

    @property
    def complete(self) -> bool:
        """Whether nothing can follow but the end of the text."""
        return self.state.is_stopped() and not self.state.is_error()

    def fitting(self, tokens: Sequence[int]) -> int:
        """How many of these tokens, from the first, may come next one after the other. Changes
        nothing."""
        return int(self.state.validate_tokens(list(tokens))) if tokens else 0

    def following(self, most: int) -> Sequence[int]:
        """The tokens that have to come next, at most so many. Changes nothing."""
        return () if self.state.is_stopped() else self.state.compute_ff_tokens()[:most]

    def copy(self) -> Matcher:
        """A matcher in the same state, which goes on by itself."""
        state = self.state.deep_copy()
        most = self.most_forced
        made = Matcher(self.field, state, self.executor, self.words, self.counters, most)
        made.tokens, made.size, made._due = self.tokens, self.size, self._due
        return made

    def grown(self) -> int:
        """Bytes by which the matcher has grown since its last measurement. Call it after each step;
        it measures whenever the tokens are a quarter more, which costs the same per token however
        long the answer is."""
        if self.tokens < self._due:
            return 0
        self._due = self.tokens + max(MEASURED, self.tokens // 4)
        before, self.size = self.size, max(self.size, matcher_size(self.state, self.tokens))
        return self.size - before

    def completes(self, token: int) -> bool:
        """Whether nothing can follow this token but the end of the text."""
        state = self.state.deep_copy()
        return state.consume_token(token) and state.is_stopped() and not state.is_error()

    def accept(self, token: int, room: int) -> Sequence[int]:
        """Take a token that was drawn. Returns the tokens that have to follow, at most `room`,
        which the matcher has then taken too.

        Raises `RequestFailed`: the token does not fit, or the grammar takes too much work. The
        library says neither by itself: a matcher that has failed bars all but the end of the text.
        """
        state = self.state
        # A matcher that failed before accepts the end of the text without an error.
        if not state.consume_token(token) or state.is_error():
            raise self._failure()
        self.tokens += 1
        most = min(room, self.most_forced)
        if most <= 0 or state.is_stopped():
            return ()
        forced = state.compute_ff_tokens()[:most]
        if forced and not state.consume_tokens(forced):
            raise self._failure()
        self.tokens += len(forced)
        self.counters.forced_tokens += len(forced)
        return forced

    def _failure(self) -> RequestFailed:
        why = f"the answer cannot go on as its format demands: {reason(self.state)}"
        return RequestFailed(f"{self.field}: {why}")


def reason(state: LLMatcher) -> str:
    """Why the library's matcher failed, without the grammar's own text."""
    # The library appends its own internal position.
    why = state.get_error().partition("<non-verbose/>")[0].partition("while processing")[0].strip()
    # NoExtensionBias: the parser found only late that nothing fits, and calls that an end.
    return "no text fits it" if why in ("", "NoExtensionBias") else why
