"""From drawn tokens to chunks: detokenise, find stop strings, put into the buffer."""

from __future__ import annotations

from collections.abc import Sequence

from asyncinfer.engine.job import Answer
from asyncinfer.engine.stream_buffer import Packed

__all__ = ["advance", "finish", "show_held"]


def advance(
    answer: Answer,
    tokens: Sequence[int],
    reason: str | None,
    logprobs: Packed = (),
) -> str | None:
    """Hand `tokens` on to the consumer; `reason` is why the answer ends with them, if it does.

    Returns the reason the answer ends, which is "stop" when a stop string was found. The text of
    a stop token or stop string, and of anything after it, is never shown.
    """
    answer.count += len(tokens)
    if reason is None and answer.stops is None and len(tokens) == 1:
        # Nearly every token there is.
        text = answer.detokenizer.push(tokens[0])
    else:
        text, reason = _read(answer, tokens, reason)
    _put(answer, text, tokens, logprobs, reason)
    return reason


def finish(answer: Answer, reason: str) -> None:
    """End an answer between two tokens, showing what was held back."""
    text = answer.detokenizer.flush()
    if answer.stops is not None:
        text, found = answer.stops.push(text, answer.count >= answer.job.params.min_tokens)
        if not found:
            text += answer.stops.flush()
    _put(answer, text, (), (), reason)


def show_held(answer: Answer) -> None:
    """Before an end that is none of the answer's: what was held back as the possible beginning of a
    stop string is text. An unfinished character stays away, for nobody knows what it is."""
    if answer.stops is not None and (text := answer.stops.flush()):
        _put(answer, text, (), (), None)


def _read(answer: Answer, tokens: Sequence[int], reason: str | None) -> tuple[str, str | None]:
    """The text that `tokens` settle, and why the answer ends, if it does."""
    shown = tokens[:-1] if reason == "stop" else tokens
    text = "".join(map(answer.detokenizer.push, shown))
    if reason is not None:
        text += answer.detokenizer.flush()
    if answer.stops is not None:
        text, found = answer.stops.push(text, answer.count >= answer.job.params.min_tokens)
        if found:
            reason = "stop"
        elif reason is not None:
            text += answer.stops.flush()
    return text, reason


def _put(
    answer: Answer,
    text: str,
    tokens: Sequence[int],
    logprobs: Packed,
    reason: str | None,
) -> None:
    job = answer.job
    job.delivered += len(tokens)
    job.buffer.put((text, tuple(tokens), logprobs, answer.index, reason))
