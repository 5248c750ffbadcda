"""What a request says beside its sampling: `RequestOptions`, checked when they are made."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import get_args

from asyncinfer.config import OnFull
from asyncinfer.errors import InvalidRequest

__all__ = ["RequestOptions"]

MAX_BUFFER = 1_000_000
MAX_SCOPE_CHARS = 256


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
        for name, low, high in (("priority", -(2**31), 2**31 - 1), ("buffer", 1, MAX_BUFFER)):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int):
                raise InvalidRequest(name, value, "must be an integer")
            if not low <= value <= high:
                raise InvalidRequest(name, value, f"must be between {low} and {high}")
        if self.deadline is not None and not (
            isinstance(self.deadline, int | float)
            and not isinstance(self.deadline, bool)
            and math.isfinite(self.deadline)
            and self.deadline > 0
        ):
            raise InvalidRequest(
                "deadline", self.deadline, "must be a finite number of seconds > 0"
            )
        if not isinstance(self.cache_scope, str) or len(self.cache_scope) > MAX_SCOPE_CHARS:
            raise InvalidRequest(
                "cache_scope",
                self.cache_scope,
                f"must be a string of <= {MAX_SCOPE_CHARS} characters",
            )
        if self.on_full not in get_args(OnFull):
            raise InvalidRequest("on_full", self.on_full, f"must be one of {get_args(OnFull)}")
