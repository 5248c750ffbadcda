"""What ends an answer, or its reasoning, early: made for each answer from a request's options."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from asyncinfer.errors import InvalidRequest
from asyncinfer.grammar import Reasoning, StopRegex, compile_stop
from asyncinfer.params import SamplingParams
from asyncinfer.text import StopChain, StopStrings, TextStop, Tokenizer
from asyncinfer.tools import MessageReader

__all__ = ["reasoning_of", "stop_tokens", "text_stop"]


def stop_tokens(
    params: SamplingParams, tokenizer: Tokenizer, message: MessageReader | None
) -> dict[int, str]:
    """The stop strings that are special tokens, by these. Such a token ends the answer: it adds
    nothing to the text, where the string would be looked for in vain."""
    # A delimiter is found in the text, in which it has a mark.
    marks = {} if message is None else message.delimiters.marks
    named = {tokenizer.special_id(stop): stop for stop in params.stop}
    return {id: stop for id, stop in named.items() if id is not None and id not in marks}


def text_stop(params: SamplingParams, stops: StopStrings | None) -> TextStop | None:
    """Searches one answer for stop strings and expressions; None without any. All answers of a
    request share what `stops` knows of its strings."""
    strings = None if stops is None else stops.another()
    if not params.stop_regex:
        return strings
    regex = StopRegex(compile_stop(params.stop_regex), include=params.include_stop)
    return regex if strings is None else StopChain(strings, regex)


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
