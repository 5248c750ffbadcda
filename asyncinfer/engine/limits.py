"""What ends an answer, or its reasoning, early: made for each answer from a request's options."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from asyncinfer.errors import InvalidRequest
from asyncinfer.grammar import Reasoning, StopRegex, compile_stop
from asyncinfer.params import SamplingParams
from asyncinfer.text import Detokenizer, StopChain, StopStrings, TextStop, Tokenizer
from asyncinfer.tools import (
    FURTHER_MARKS,
    Delimiters,
    Detokenizes,
    MarkingDetokenizer,
    MessageReader,
    message_text,
)

__all__ = ["TextStops", "reasoning_of", "stop_tokens"]


def stop_tokens(
    params: SamplingParams, tokenizer: Tokenizer, message: MessageReader | None
) -> dict[int, str]:
    """The stop strings that are special tokens, by these. Such a token ends the answer: it adds
    nothing to the text, where the string would be looked for in vain."""
    # A delimiter is found in the text, in which it has a mark.
    marks = {} if message is None else message.delimiters.marks
    named = {tokenizer.special_id(stop): stop for stop in params.stop}
    return {id: stop for id, stop in named.items() if id is not None and id not in marks}


class TextStops:
    """What ends the texts of a request's answers, of which each has its own watcher."""

    def __init__(
        self, params: SamplingParams, tokenizer: Tokenizer, message: MessageReader | None
    ) -> None:
        self._params = params
        self._message = message
        stop = params.stop if message is None else message.delimiters.stops(params.stop)
        #: Marks of special tokens that are part of a stop string, since they add no text.
        self._special = special = _special_parts(params, tokenizer, message)
        if special is not None:
            stop = special.stops(stop)
        #: Bytes at most that watching the texts takes.
        self.held_bytes = StopStrings.held_bytes(stop, params.n) if stop else 0
        self._strings = StopStrings(stop, include=params.include_stop) if stop else None

    def detokenizer(self, decoding: Detokenizer) -> Detokenizes:
        """Decodes one answer for its watcher."""
        made = message_text(self._message, decoding)
        return made if self._special is None else MarkingDetokenizer(made, self._special.marks)

    def watcher(self) -> TextStop | None:
        """Searches one answer for stop strings and expressions; None without any. All answers
        share what is known of the strings."""
        strings: TextStop | None = None if self._strings is None else self._strings.another()
        if strings is not None and self._special is not None:
            strings = _Unmarked(strings, self._special)
        if not self._params.stop_regex:
            return strings
        pattern = compile_stop(self._params.stop_regex)
        regex = StopRegex(pattern, include=self._params.include_stop)
        return regex if strings is None else StopChain(strings, regex)


def _special_parts(
    params: SamplingParams, tokenizer: Tokenizer, message: MessageReader | None
) -> Delimiters | None:
    """Marks for the special tokens that a stop string joins with other text; None without any."""
    joining = [stop for stop in params.stop if tokenizer.special_id(stop) is None]
    words = tokenizer.shield.words("\n".join(joining)) if joining else ()
    marks = {} if message is None else message.delimiters.marks
    parts = [word for word in words if tokenizer.added_tokens[word] not in marks]
    return Delimiters(tokenizer, parts, FURTHER_MARKS) if parts else None


class _Unmarked:
    """A watcher whose text has marks of special tokens, which are not shown."""

    __slots__ = ("_inner", "_marked")

    def __init__(self, inner: TextStop, marked: Delimiters) -> None:
        self._inner = inner
        self._marked = marked

    def push(self, text: str, ends: bool = True) -> tuple[str, str | None]:
        shown, found = self._inner.push(text, ends)
        return self._marked.shown(shown), found and self._marked.unmarked(found)

    def flush(self) -> str:
        return self._marked.shown(self._inner.flush())


def reasoning_of(
    params: SamplingParams, tokenizer: Tokenizer, prompt_ids: Sequence[int], buffer: int
) -> Reasoning | None:
    """Enforces the thinking budget of one answer; None without one. Raises `InvalidRequest`."""
    if params.thinking_budget is None:
        return None
    opening, closing = params.thinking_tags
    closing_ids = _tag_ids(tokenizer, closing)
    if len(closing_ids) >= buffer:
        bound = f"must be > {len(closing_ids)}, the tokens of the closing tag, with thinking_budget"
        raise InvalidRequest("buffer", buffer, bound)
    made = Reasoning(
        params.thinking_budget,
        opening.encode(),
        closing.encode(),
        closing_ids,
        _bytes_of(tokenizer, params.thinking_tags),
    )
    made.begin(prompt_ids)
    return made


def _tag_ids(tokenizer: Tokenizer, tag: str) -> list[int]:
    special = tokenizer.special_id(tag)
    return tokenizer.encode_inner(tag) if special is None else [special]


def _bytes_of(tokenizer: Tokenizer, tags: tuple[str, str]) -> Callable[[int], bytes]:
    """The bytes that a token adds to the text in which the tags are looked for."""
    if tokenizer.token_bytes(0) is not None:
        return lambda token: tokenizer.token_bytes(token) or b""
    # With these decoders a token has no bytes of its own, but a tag that is one token can be told.
    known: dict[int, bytes] = {}
    for tag in tags:
        ids = _tag_ids(tokenizer, tag)
        if len(ids) != 1:
            raise InvalidRequest("thinking_tags", tag, "is no single token of this tokenizer")
        known[ids[0]] = tag.encode()
    return lambda token: known.get(token, b"?")
