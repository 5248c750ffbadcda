"""`RequestOptions`: the options of a request that do not concern sampling."""

from __future__ import annotations

from dataclasses import dataclass
from typing import get_args

from asyncinfer.bounds import (
    MAX_ADAPTER_NAME,
    MAX_BUFFER,
    MAX_DEADLINE,
    MAX_PREDICTION,
    MAX_PRIORITY,
    MAX_SCOPE_CHARS,
    MAX_STREAM_INTERVAL,
)
from asyncinfer.cache import Conversation
from asyncinfer.checks import check_choice, check_integer, check_real, check_string, check_token_ids
from asyncinfer.config import OnFull
from asyncinfer.engine.beam_group import BeamOptions
from asyncinfer.errors import InvalidRequest, Size
from asyncinfer.scheduler import Pooling
from asyncinfer.tools import ChatOptions

__all__ = ["RequestOptions"]


@dataclass(frozen=True, slots=True)
class RequestOptions:
    """Raises `InvalidRequest`."""

    #: Larger is more urgent (with `scheduler="priority"`).
    priority: int
    #: Seconds from the start of the stream after which it fails with `DeadlineExceeded`.
    deadline: float | None
    #: Requests share cached prefixes within a scope only.
    cache_scope: str
    #: Tokens held for a slow consumer before `on_full` applies.
    buffer: int
    on_full: OnFull
    #: The expected answer: text, or token ids; None without.
    prediction: str | tuple[int, ...] | None = None
    #: Name of a LoRA adapter, which is looked up when the request gets its place.
    adapter: str | None = None
    #: Tokens of a chunk; the first token is sent alone.
    stream_interval: int = 1
    #: Options of chats; None for the defaults.
    chat: ChatOptions | None = None
    #: Options of a beam search; None for other requests.
    search: BeamOptions | None = None
    #: The request's conversation.
    conversation: Conversation | None = None
    #: How many prompt tokens, from the second on, need no logprob though later ones do.
    scored: int = 0
    #: How the prompt's embedding is pooled; None: none is wanted.
    pooling: Pooling | None = None

    def __post_init__(self) -> None:
        put = object.__setattr__
        put(self, "priority", check_integer("priority", self.priority, -MAX_PRIORITY, MAX_PRIORITY))
        put(self, "buffer", check_integer("buffer", self.buffer, 1, MAX_BUFFER))
        interval = check_integer("stream_interval", self.stream_interval, 1, MAX_STREAM_INTERVAL)
        put(self, "stream_interval", interval)
        if interval > self.buffer:
            raise InvalidRequest("stream_interval", interval, f"must be <= buffer={self.buffer}")
        if self.deadline is not None:
            seconds = check_real("deadline", self.deadline, 0.0, MAX_DEADLINE, open_low=True)
            put(self, "deadline", seconds)
        check_string("cache_scope", self.cache_scope, MAX_SCOPE_CHARS)
        if self.adapter is not None:
            check_string("adapter", self.adapter, MAX_ADAPTER_NAME, least=1)
        if self.prediction is not None:
            put(self, "prediction", _prediction(self.prediction))
        check_choice("on_full", self.on_full, get_args(OnFull))


def _prediction(value: object) -> str | tuple[int, ...]:
    if not isinstance(value, str | list | tuple):
        raise InvalidRequest("prediction", value, "must be a string or a list of token ids")
    if len(value) > MAX_PREDICTION:
        unit = "characters" if isinstance(value, str) else "tokens"
        raise InvalidRequest(
            "prediction", Size(f"{len(value)} {unit}"), f"at most {MAX_PREDICTION}"
        )
    return value if isinstance(value, str) else check_token_ids("prediction", value)
