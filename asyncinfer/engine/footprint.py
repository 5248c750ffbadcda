"""The bytes of host memory that a request holds, computed before the engine accepts it.

Sizes are CPython's: a list has 8 bytes for each entry, and an integer above 256 is an object of
28 bytes in 32.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from itertools import chain
from sys import getsizeof
from typing import Any, Final

from asyncinfer.bounds import MAX_MESSAGE_VALUES
from asyncinfer.checks import check_messages
from asyncinfer.engine.spoken import SpokenMessages
from asyncinfer.errors import InvalidRequest, Size
from asyncinfer.params import SamplingParams
from asyncinfer.scheduler import FIXED_WORDS
from asyncinfer.speculation import TOKEN_BYTES
from asyncinfer.tools import ChatOptions

__all__ = [
    "beam_bytes",
    "drafting_bytes",
    "logprob_bytes",
    "matcher_bytes",
    "prepared_bytes",
    "submitted_bytes",
    "texts_of",
]

_ENTRY: Final = 8
_INTEGER: Final = 32
#: An unread chunk of one token: two tuples, a short text and their place in a queue.
_CHUNK: Final = 256
#: A candidate of a beam search: a tuple of a token, a logprob and a place in a list.
_CANDIDATE: Final = 64 + _INTEGER + 24 + _ENTRY
#: Types of values that hold no other values.
_LEAVES: Final = frozenset((str, bool, int, float, type(None)))
#: The deepest nesting of values in messages that is accepted; chat templates accept less.
_MOST_LEVELS: Final = 64
#: Bytes of a matcher, and of each character of its format: after the first mask a format of a few
#: characters took 5 kB and one of 22,000 characters 37 kB.
_MATCHER: Final = 6144
_MATCHER_CHAR: Final = 2


def submitted_bytes(prompt: Any, buffer: int, chat: ChatOptions | None = None, *others: Any) -> int:
    """Bytes that a request holds from its submission on: its prompt as it was given, its tools, its
    other inputs, and a full buffer. Raises `InvalidRequest` for a chat of too many messages, or
    with too many values in them.

    Args:
        prompt: anything; what is no prompt is refused later and counts as nothing.
        buffer: tokens that the stream may hold unread.
        others: texts, tokens or messages, such as the prediction; None counts as nothing.
    """
    tools = 0 if chat is None else chat.held_bytes
    return sum(map(_prompt_bytes, (prompt, *others))) + tools + buffer * _CHUNK


def matcher_bytes(format_chars: int, answers: int) -> int:
    """Bytes that the matchers of `answers` hold at first, for a format of `format_chars`
    characters. Their growth is charged as it happens: see `Matcher.grown`."""
    return answers * (_MATCHER + _MATCHER_CHAR * format_chars)


def prepared_bytes(prompt_len: int, num_keys: int, params: SamplingParams) -> int:
    """Bytes that the preparation adds: the token ids and their chain keys, once for the prompt and
    once as a list of each answer's own, and the logprobs of the prompt."""
    tokens = prompt_len * (_INTEGER + _ENTRY * params.n)
    keys = num_keys * (getsizeof(bytes(32)) + _ENTRY * params.n)
    logprobs = 0
    if params.prompt_logprobs is not None:
        logprobs = 4 * prompt_len * (FIXED_WORDS + 2 * params.prompt_logprobs)
    return tokens + keys + logprobs


def logprob_bytes(answer: int, params: SamplingParams) -> int:
    """Bytes of the logprobs of answers of so many tokens, which their stream keeps to its end."""
    if params.alternatives is None:
        return 0
    return 4 * answer * params.n * (FIXED_WORDS + 2 * params.alternatives)


def beam_bytes(
    beams: int, candidates: int, prompt_len: int, most: int, blocks: int, format_chars: int
) -> int:
    """Bytes that a beam search adds to a request of one answer at its longest.

    Each beam is a sequence of its own, which lives until its successors were computed: so many
    lists of tokens and of keys, matchers, and lists of what may follow. Three tuples of its tokens
    are the beam, the one before, and a finished answer.

    Args:
        candidates: that are looked at after each beam.
        most: tokens of the longest answer.
        blocks: of the longest sequence.
        format_chars: of the format that the answers have to fit, 0 without one.
    """
    live = 2 * beams
    lists = live * _ENTRY * (prompt_len + most + blocks)
    answers = beams * most * (3 * _ENTRY + _INTEGER)
    keys = beams * blocks * getsizeof(bytes(32))
    matchers = matcher_bytes(format_chars, live) if format_chars else 0
    return lists + answers + keys + live * candidates * _CANDIDATE + matchers


def drafting_bytes(prompt_len: int, predicted: int, answers: int) -> int:
    """Bytes that drafts add: the tokens of the prediction once, and those of each answer's text."""
    return TOKEN_BYTES * (predicted + prompt_len * answers)


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
        check_messages("prompt", prompt)
        answered = prompt.answered if isinstance(prompt, SpokenMessages) else None
        said = 0 if answered is None else len(answered.token_ids) * (_ENTRY + _INTEGER)
        return said + _message_bytes(prompt)
    return len(prompt) * (_ENTRY + _INTEGER)


def _message_bytes(messages: Sequence[Any]) -> int:
    """Bytes of all fields of chat messages, since calls and reasoning may be longer than contents.
    Raises `InvalidRequest` for more values than an event loop has time to look at."""
    size = looked = 0
    level: list[Any] = [*messages]
    for _ in range(_MOST_LEVELS):
        objects = [each for each in level if type(each) is dict or isinstance(each, Mapping)]
        lists = [each for each in level if isinstance(each, list | tuple)]
        looked += sum(map(len, objects)) + sum(map(len, lists))
        if looked > MAX_MESSAGE_VALUES:
            value = Size(f"{looked} values or more in messages")
            raise InvalidRequest("prompt", value, f"at most {MAX_MESSAGE_VALUES}")
        # Whole levels of values at a time, mostly in C: there may be a hundred thousand values.
        inner = objects, [each.values() for each in objects], lists
        values: list[Any] = [*chain.from_iterable(chain(*inner))]
        size += sum(map(getsizeof, values))
        level = [each for each in values if type(each) not in _LEAVES]
        if not level:
            return size
    raise InvalidRequest("prompt", Size("messages"), f"at most {_MOST_LEVELS} levels deep")
