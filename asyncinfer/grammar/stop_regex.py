"""`StopRegex`: ends a text before the first match of regular expressions."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from typing import TYPE_CHECKING, Final

from asyncinfer.bounds import MAX_STOP_REGEX_SPAN
from asyncinfer.errors import InvalidRequest, RequestFailed
from asyncinfer.grammar.masks import allowed_ids

if TYPE_CHECKING:
    from llguidance import LLMatcher

__all__ = ["StopPattern", "StopRegex", "compile_stop"]

#: Bounds of an automaton's work, all counted. A state takes some 2 kB.
_LIMITS: Final = {
    "initial_lexer_fuel": 100_000,
    "step_lexer_fuel": 50_000,
    "max_lexer_states": 2_000,
    "verbose_errors": False,
}
#: Bytes after which an automaton is replaced by a new one, since it keeps all that it has read.
_RENEW: Final = 1 << 16


@dataclass(frozen=True, slots=True)
class StopPattern:
    """Automata at their start, over bytes. The library takes the derivative of an expression by
    each byte (Brzozowski, 1964), and so never backtracks."""

    #: Accepts a text that ends with a match.
    ends: LLMatcher
    #: Accepts a match.
    whole: LLMatcher
    #: The bytes with which a match can begin.
    first: frozenset[int]


@lru_cache(maxsize=16)
def compile_stop(patterns: tuple[str, ...]) -> StopPattern:
    """All of the expressions as one. Takes about a millisecond, without the GIL.

    Raises `InvalidRequest` for one that is wrong, takes too much work or matches the empty text.
    """
    import numpy as np

    for pattern in patterns:
        # By itself first, so that an error shows the expression as it was given.
        if _compiled(pattern, pattern).is_accepting():
            raise InvalidRequest("stop_regex", pattern, "matches the empty text")
        # The library drops `^` and `$` at the ends of an expression, and refuses them within one.
        _compiled(f".?(?:{pattern}).?", pattern, within=True)
    either = "|".join(f"(?:{pattern})" for pattern in patterns)
    whole = _compiled(either, patterns[0])
    mask = np.frombuffer(whole.deep_copy().compute_bitmask(), np.int32)
    first = frozenset(allowed_ids(mask, 256).tolist())
    return StopPattern(_compiled(f"(.|\\n)*(?:{either})", patterns[0]), whole, first)


def _compiled(expression: str, shown: str, *, within: bool = False) -> LLMatcher:
    """`within`: the expression holds one that is valid by itself."""
    from llguidance import LLMatcher, LLParserLimits, LLTokenizer

    limits = LLParserLimits(**_LIMITS)  # type: ignore[arg-type]
    grammar = LLMatcher.grammar_from_regex(expression)
    made = LLMatcher(LLTokenizer("byte"), grammar, log_level=0, limits=limits)
    if made.is_error():
        why = " ".join(made.get_error().split())[:300]
        if within and "invalid regex" in why:
            why = "must have no anchor, such as ^ or $, and no comment at its end"
        raise InvalidRequest("stop_regex", shown, why)
    # Some errors show only where a mask is made.
    probe = made.deep_copy()
    probe.compute_bitmask()
    if probe.is_error():
        raise InvalidRequest("stop_regex", shown, " ".join(probe.get_error().split())[:300])
    return made


class StopRegex:
    """Watches the text of one sequence for a match of at most `MAX_STOP_REGEX_SPAN` characters.

    As soon as a match is complete, the text ends before the leftmost one that ends there. Until
    then the text from where a match may have begun is held back. A character costs a step of an
    automaton, and at most one more for each character that is held back.
    """

    __slots__ = ("_begun", "_ends", "_held", "_include", "_pattern", "_read", "_recent")

    def __init__(self, pattern: StopPattern, *, include: bool = False) -> None:
        """`include`: show the match, too."""
        self._pattern = pattern
        self._include = include
        self._ends = pattern.ends.deep_copy()
        #: Bytes that it has read.
        self._read = 0
        #: The last characters, a span's worth at least.
        self._recent = ""
        #: What may begin a match, and the automaton that has read it.
        self._held = ""
        self._begun: LLMatcher | None = None

    def push(self, text: str, ends: bool = True) -> tuple[str, str | None]:
        """`(text safe to show, the match if there is one)`. Not to be called after a match. Unless
        `ends`, a match that `text` completes does not count; one that only begins in it still may.

        Raises `RequestFailed` where an automaton takes too much work.
        """
        shown: list[str] = []
        for char in text:
            held = self._held + char
            if self._ends_with(char) and ends and (start := self._start(held)) is not None:
                self._held = ""
                return "".join(shown) + (held if self._include else held[:start]), held[start:]
            shown.append(self._hold(char))
        return "".join(shown), None

    def flush(self) -> str:
        """What was held back: the text ended without a match."""
        held, self._held, self._begun = self._held, "", None
        return held

    def _ends_with(self, char: str) -> bool:
        """Whether a match, however long, ends with the next character."""
        data = list(_bytes(char))
        if self._read > _RENEW:
            self._ends, self._read = self._pattern.ends.deep_copy(), 0
            data = list(_bytes(self._recent[-MAX_STOP_REGEX_SPAN:] + char))
        self._recent += char
        if len(self._recent) > 4 * MAX_STOP_REGEX_SPAN:
            self._recent = self._recent[-MAX_STOP_REGEX_SPAN:]
        self._read += len(data)
        if not self._ends.consume_tokens(data) or self._ends.is_error():
            raise _failure(self._ends)
        return self._ends.is_accepting()

    def _start(self, held: str) -> int | None:
        """Where the leftmost match lies that ends with the text held back."""
        for start in range(len(held)):
            matcher = self._after(held[start:])
            if matcher is not None and matcher.is_accepting():
                return start
        return None

    def _hold(self, char: str) -> str:
        """Hold the next character back. Returns the held text that can begin no match any more."""
        held = self._held = self._held + char
        begun = self._begun
        if begun is not None and len(held) < MAX_STOP_REGEX_SPAN:
            data = list(_bytes(char))
            if begun.try_consume_tokens(data) == len(data) and not begun.is_stopped():
                return ""
            if begun.is_error():
                raise _failure(begun)
        # A place where no match can begin stays one, so each character is tried once.
        for start in range(begun is not None, len(held)):
            self._begun = self._after(held[start:])
            if self._begun is not None and not self._begun.is_stopped():
                self._held = held[start:]
                return held[:start]
        self._held, self._begun = "", None
        return held

    def _after(self, text: str) -> LLMatcher | None:
        """An automaton of a match that has read `text`; None where that begins none."""
        data = list(_bytes(text))
        if data[0] not in self._pattern.first:
            return None
        matcher = self._pattern.whole.deep_copy()
        taken = matcher.try_consume_tokens(data)
        if matcher.is_error():
            raise _failure(matcher)
        return matcher if taken == len(data) else None


def _failure(matcher: LLMatcher) -> RequestFailed:
    why = " ".join(matcher.get_error().split())[:200]
    return RequestFailed(f"stop_regex takes too much work: {why}")


def _bytes(text: str) -> bytes:
    """The bytes that an automaton reads. A delimiter's mark is no text, and is read as `?`."""
    return text.encode(errors="replace")
