"""What a request says beside its sampling: `RequestOptions`, checked when they are made."""

from __future__ import annotations

from dataclasses import dataclass
from typing import get_args

from asyncinfer.bounds import MAX_BUFFER, MAX_DEADLINE, MAX_PRIORITY, MAX_SCOPE_CHARS
from asyncinfer.checks import check_integer, check_real
from asyncinfer.config import OnFull
from asyncinfer.errors import InvalidRequest

__all__ = ["RequestOptions"]


@dataclass(frozen=True, slots=True)
class RequestOptions:
    """Raises `InvalidRequest`."""

    #: Larger is more urgent (with `scheduler="priority"`).
    priority: int
    #: Seconds from the start of the stream after which it fails with `DeadlineExceeded`.
    deadline: float | None
    #: Prefix-cache tenant: requests share cached prefixes within a scope only.
    cache_scope: str
    #: Tokens held for a slow consumer before `on_full` applies.
    buffer: int
    on_full: OnFull

    def __post_init__(self) -> None:
        put = object.__setattr__
        put(self, "priority", check_integer("priority", self.priority, -MAX_PRIORITY, MAX_PRIORITY))
        put(self, "buffer", check_integer("buffer", self.buffer, 1, MAX_BUFFER))
        if self.deadline is not None:
            seconds = check_real("deadline", self.deadline, 0.0, MAX_DEADLINE, open_low=True)
            put(self, "deadline", seconds)
        if not isinstance(self.cache_scope, str) or len(self.cache_scope) > MAX_SCOPE_CHARS:
            raise InvalidRequest(
                "cache_scope",
                self.cache_scope,
                f"must be a string of <= {MAX_SCOPE_CHARS} characters",
            )
        if self.on_full not in get_args(OnFull):
            raise InvalidRequest("on_full", self.on_full, f"must be one of {get_args(OnFull)}")
