"""`GrammarCompiler`: from an answer's format to matchers, each format compiled once."""

from __future__ import annotations

import json
import os
import re
import time
from collections import OrderedDict
from collections.abc import Callable
from threading import Lock
from typing import TYPE_CHECKING, Final

from asyncinfer.errors import InvalidRequest, Size
from asyncinfer.grammar.counters import GrammarCounters
from asyncinfer.grammar.endless import check_ends
from asyncinfer.grammar.masks import allowed_ids, mask_words
from asyncinfer.grammar.matcher import Matcher, reason
from asyncinfer.grammar.places import check_values, place_of_error
from asyncinfer.grammar.texts import grammar_text, json_grammar
from asyncinfer.grammar.tokens import grammar_tokenizer, spelled_chars
from asyncinfer.structured_output import AnswerFormat
from asyncinfer.text import Tokenizer

if TYPE_CHECKING:
    from llguidance import LLExecutor, LLMatcher, LLParserLimits

__all__ = ["GrammarCompiler"]

#: Formats that are kept, and the characters of all of them.
MOST_KEPT: Final = 256
MOST_KEPT_CHARS: Final = 1 << 22
#: Threads that fill masks.
MOST_THREADS: Final = 8
#: What the library advises where a `oneOf` may have several parts that fit: no option here does.
_ADVICE: Final = "Enable 'coerce_one_of' option to approximate oneOf with anyOf"
_UNSPELLED: Final = "no tokens of this model spell text that has to come"
#: A text of a grammar, and how it writes characters by their numbers.
_LITERAL: Final = re.compile(r'"(?:[^"\\\n]|\\.)*"')
_ESCAPED: Final = re.compile(r"\\\\|\\[xu]\{?([0-9a-fA-F]{2,4})\}?")
#: Bounds of the work of one matcher, all counted and none timed. The largest schema that they and
#: `MAX_GRAMMAR_CHARS` allow takes half a second, most take a millisecond. A mask takes 20 ms at
#: most. A state of a lexer takes some 2 kB.
LIMITS: Final = {
    "initial_lexer_fuel": 400_000,
    "step_lexer_fuel": 200_000,
    "step_max_items": 50_000,
    "max_lexer_states": 50_000,
    "max_grammar_size": 100_000,
    # Errors show neither the grammar nor the parser's state.
    "verbose_errors": False,
}


class GrammarCompiler:
    """The grammars of an engine. `matchers` may be called from any thread but an event loop's.

    Nothing is made before the first request that asks for it; `warm_up` makes it at once.

    Args:
        vocab_size: entries of the model's logits.
    """

    def __init__(self, tokenizer: Tokenizer, vocab_size: int) -> None:
        self.counters = GrammarCounters()
        self._tokenizer = tokenizer
        self._vocab_size = vocab_size
        self._making = Lock()
        #: Why the library cannot read the tokenizer; empty while that is not known.
        self._unreadable = ""
        #: By the tokens that are no text to a grammar, beside the special ones.
        self._libraries: dict[frozenset[int], _Library] = {}
        self._lock = Lock()
        #: Matchers at their start, the one used last at the end.
        self._kept: OrderedDict[AnswerFormat, LLMatcher] = OrderedDict()
        self._kept_chars = 0

    def warm_up(self) -> None:
        """Make what all grammars share, which takes tens of milliseconds."""
        self._shared()

    def at_hand(self, form: AnswerFormat) -> bool:
        """Whether the format is compiled already, so that `matchers` takes microseconds."""
        return form in self._kept

    def matchers(
        self,
        form: AnswerFormat,
        count: int,
        most_forced: int,
        on_compiled: Callable[[float], object] = lambda seconds: None,
    ) -> list[Matcher]:
        """`count` matchers, each at the start of the format. `on_compiled` is called with the
        seconds that compiling took, 0 where that was done before.

        Raises `InvalidRequest` for a format that is wrong, or takes too much work.
        """
        library = self._shared(form.tokens)
        with self._lock:
            start = self._kept.get(form)
            if start is not None:
                self.counters.hits += 1
                self._kept.move_to_end(form)
        seconds = 0.0
        if start is None:
            # Not under the lock, for which an event loop with a compiled format would wait.
            began = time.perf_counter()
            start = self._compile(library, form)
            seconds = time.perf_counter() - began
            with self._lock:
                self.counters.compiled += 1
                self.counters.compile_seconds += seconds
                self._keep(form, start)
        on_compiled(seconds)
        words = mask_words(self._vocab_size)
        return [
            Matcher(
                form.kind, start.deep_copy(), library.executor, words, self.counters, most_forced
            )
            for _ in range(count)
        ]

    def _shared(self, marked: frozenset[int] = frozenset()) -> _Library:
        library = self._libraries.get(marked)
        if library is not None:
            return library
        if not any(token < self._vocab_size for token in self._tokenizer.eos_ids):
            what = "this model has no end-of-text token, with which such an answer ends"
            raise InvalidRequest("constraint", Size("structured output"), what)
        with self._making:
            if marked not in self._libraries and not self._unreadable:
                try:
                    self._libraries[marked] = _Library(self._tokenizer, self._vocab_size, marked)
                except ValueError as error:
                    # Trying again would keep the GIL as long each time.
                    self._unreadable = f"no grammar can be made for this model's tokenizer: {error}"
            if self._unreadable:
                raise InvalidRequest("constraint", Size("structured output"), self._unreadable)
            return self._libraries[marked]

    def _keep(self, form: AnswerFormat, start: LLMatcher) -> None:
        if form in self._kept:
            # Another thread has compiled it at the same time.
            return
        self._kept[form] = start
        self._kept_chars += len(form.text)
        while len(self._kept) > MOST_KEPT or self._kept_chars > MOST_KEPT_CHARS:
            dropped, _ = self._kept.popitem(last=False)
            self._kept_chars -= len(dropped.text)

    def _compile(self, library: _Library, form: AnswerFormat) -> LLMatcher:
        # These errors would come in the middle of an answer.
        match form.kind:
            case "choice":
                for choice in json.loads(form.text):
                    if not library.special.isdisjoint(self._tokenizer.encode_inner(choice)):
                        raise InvalidRequest("choice", choice, _UNSPELLED)
            case "grammar":
                for literal in _LITERAL.findall(form.text) if library.missing else ():
                    text = _ESCAPED.sub(lambda at: chr(int(at[1] or "5c", 16)), literal)
                    if not library.missing.isdisjoint(text.encode(errors="replace")):
                        raise InvalidRequest("grammar", literal, _UNSPELLED)
            case "json_schema":
                schema = json.loads(form.text)
                check_ends(form.kind, schema)
                check_values(form.kind, schema)
            case "structural_tag":
                for index, one in enumerate(json.loads(form.text)["structures"]):
                    place = f"{form.kind}/structures/{index}/schema"
                    check_ends(place, one["schema"])
                    check_values(place, one["schema"])
        special = self._tokenizer.special_id
        start = library.matcher(grammar_text(form, special, library.spelled))
        if why := library.problem(start):
            if library.spelled and form.kind == "regex":
                why = library.problem(library.matcher(grammar_text(form, special))) or _UNSPELLED
            field, size = form.kind, Size(f"{len(form.text)} characters")
            if form.kind == "json_schema":
                field += _place(form, library)
            raise InvalidRequest(field, form.text if field == "regex" else size, _shown(why))
        return start


class _Library:
    """The library's objects that all grammars of a model share."""

    def __init__(self, tokenizer: Tokenizer, vocab_size: int, marked: frozenset[int]) -> None:
        from llguidance import LLExecutor, LLParserLimits

        #: Tokens that spell no text.
        self.special = marked.union(tokenizer.special_ids, tokenizer.eos_ids)
        #: `missing`: bytes that are in no token of text.
        self.tokenizer, self.missing = grammar_tokenizer(tokenizer, vocab_size, marked)
        #: See `grammar_text`.
        self.spelled = spelled_chars(self.missing)
        self.executor: LLExecutor = LLExecutor(min(MOST_THREADS, os.cpu_count() or 1))
        self.limits: LLParserLimits = LLParserLimits(**LIMITS)  # type: ignore[arg-type]

    def matcher(self, grammar: str) -> LLMatcher:
        """A matcher at the start of the grammar. Compiles without the GIL."""
        from llguidance import LLMatcher

        return LLMatcher(self.tokenizer, grammar, log_level=0, limits=self.limits)

    def problem(self, start: LLMatcher) -> str:
        """Why no answer can begin; empty where one can."""
        import numpy as np

        if start.is_error():
            return reason(start)
        # Some errors show only where a mask is made, and some where the first token is taken.
        probe = start.deep_copy()
        mask = np.frombuffer(probe.compute_bitmask(), np.int32)
        first = allowed_ids(mask, self.tokenizer.vocab_size)
        unspelled = _unspelled(start)
        if not probe.is_error() and first.size and probe.consume_token(int(first[-1])):
            unspelled = unspelled or _unspelled(probe)
        return _UNSPELLED if unspelled else reason(probe) if probe.is_error() else ""


def _unspelled(state: LLMatcher) -> bool:
    """Whether the text that has to come next has none but a special token."""
    forced = [] if state.is_error() else state.compute_ff_tokens()
    return bool(forced) and state.validate_tokens(forced) < len(forced)


def _place(form: AnswerFormat, library: _Library) -> str:
    """The place of an error within a schema."""
    return place_of_error(
        json.loads(form.text), lambda one: library.problem(library.matcher(json_grammar(one)))
    )


def _shown(why: str) -> str:
    """The library's message on one line, shortened for logs."""
    line = " ".join(why.split()).replace(_ADVICE, "Several parts may fit, as with anyOf")
    return line if len(line) <= 300 else f"{line[:297]}..."
