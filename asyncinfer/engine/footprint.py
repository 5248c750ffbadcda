"""Bytes of the host's memory that a request holds, worked out before the engine takes them.

Sizes are CPython's: a list has 8 bytes for each entry, and an integer above 256 is an object of
28 bytes in 32.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from sys import getsizeof
from typing import Any, Final

from asyncinfer.params import SamplingParams
from asyncinfer.scheduler import FIXED_WORDS

__all__ = ["prepared_bytes", "submitted_bytes", "texts_of"]

_ENTRY: Final = 8
_INTEGER: Final = 32
#: An unread chunk of one token: two tuples, a short text and their place in a queue.
_CHUNK: Final = 256


def submitted_bytes(prompt: Any, buffer: int) -> int:
    """What a request holds from its submission on: its prompt as it was given, and a full buffer.

    Args:
        prompt: anything; what is no prompt is refused later and counts as nothing.
        buffer: tokens that the stream may hold unread.
    """
    return _prompt_bytes(prompt) + buffer * _CHUNK


def prepared_bytes(prompt_len: int, num_keys: int, params: SamplingParams) -> int:
    """What the preparation adds: the token ids and their chain keys, once for the prompt and once
    as a list of each answer's own, and the logprobs of the prompt."""
    tokens = prompt_len * (_INTEGER + _ENTRY * params.n)
    keys = num_keys * (getsizeof(bytes(32)) + _ENTRY * params.n)
    logprobs = 0
    if params.prompt_logprobs is not None:
        logprobs = 4 * prompt_len * (FIXED_WORDS + 2 * params.prompt_logprobs)
    return tokens + keys + logprobs


def texts_of(message: Any) -> Iterator[str]:
    """The texts in the content of a chat message that nobody has checked yet."""
    content = message.get("content") if isinstance(message, Mapping) else None
    if isinstance(content, str):
        yield content
    elif isinstance(content, list | tuple):
        for part in content:
            text = part.get("text") if isinstance(part, Mapping) else None
            if isinstance(text, str):
                yield text


def _prompt_bytes(prompt: Any) -> int:
    if isinstance(prompt, str):
        return getsizeof(prompt)
    if not isinstance(prompt, Sequence) or not prompt:
        return 0
    if isinstance(prompt[0], Mapping):
        return sum(getsizeof(text) for message in prompt for text in texts_of(message))
    return len(prompt) * (_ENTRY + _INTEGER)
