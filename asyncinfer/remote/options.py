"""Options of a request, checked before it is sent to a replica."""

from __future__ import annotations

import dataclasses
import functools
import inspect
import time
from collections.abc import Mapping
from typing import Any, Final

from asyncinfer.bounds import MAX_BUFFER
from asyncinfer.engine import Engine
from asyncinfer.engine.options import RequestOptions
from asyncinfer.errors import DeadlineExceeded, InvalidRequest
from asyncinfer.params import SamplingParams
from asyncinfer.suggestions import suggestion
from asyncinfer.tools import ChatOptions

__all__ = ["check_names", "read_params", "time_left"]

_SAMPLING: Final = frozenset(field.name for field in dataclasses.fields(SamplingParams))


def check_names(method: str, options: Mapping[str, Any]) -> None:
    """Raises `InvalidRequest` for what is no option of this method of an engine."""
    known = _names(method)
    for name in options.keys() - known:
        streams = method == "stream"
        near = suggestion(name, sorted(known | {"session"} if streams else known))
        of = "a request" if streams else f"{method}()"
        raise InvalidRequest(name, options[name], f"is no option of {of}{near}")


def read_params(options: Mapping[str, Any]) -> SamplingParams:
    """The sampling options of a stream. Raises `InvalidRequest`, also for its other options."""
    check_names("stream", options)
    if options.get("adapter") is not None:
        raise InvalidRequest("adapter", options["adapter"], "is not there for replicas")
    said = {name: value for name, value in options.items() if value is not None}
    RequestOptions(
        priority=options.get("priority", 0),
        chat=ChatOptions.of(
            options.get("tools"),
            options.get("tool_choice"),
            options.get("parallel_tool_calls", True),
            options.get("template_options"),
            options.get("continue_final_message", False),
        ),
        deadline=said.get("deadline"),
        cache_scope=options.get("cache_scope", ""),
        buffer=said.get("buffer", MAX_BUFFER),
        on_full=said.get("on_full", "pause"),
        stream_interval=options.get("stream_interval", 1),
        prediction=said.get("prediction"),
    )
    sampling = {name: value for name, value in options.items() if name in _SAMPLING}
    given = options.get("params")
    if given is None:
        return SamplingParams(**sampling)
    if not isinstance(given, SamplingParams):
        raise InvalidRequest("params", given, "must be SamplingParams")
    return dataclasses.replace(given, **sampling) if sampling else given


def time_left(until: float, request_id: str) -> float:
    """Seconds until a request's deadline. A replica counts them from the request's arrival. Raises
    `DeadlineExceeded` where there are none."""
    left = until - time.monotonic()
    if left <= 0.0:
        raise DeadlineExceeded(f"{request_id}: its deadline passed on the way")
    return left


@functools.cache
def _names(method: str) -> frozenset[str]:
    """The options of a method of an engine."""
    given = inspect.signature(getattr(Engine, method)).parameters.values()
    names = frozenset(each.name for each in given if each.kind is each.KEYWORD_ONLY)
    if method == "best_of":
        return names | _names("stream")
    return names | _SAMPLING if any(each.kind is each.VAR_KEYWORD for each in given) else names
