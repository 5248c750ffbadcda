"""Parts of an answer that OpenAI's protocols share."""

from __future__ import annotations

import json
import time
from collections.abc import Iterable, Mapping
from typing import Any, Final

from asyncinfer.chunk import ToolCall, ToolCallDelta, Usage
from asyncinfer.errors import InvalidRequest
from asyncinfer.server.call import Call, json_bytes
from asyncinfer.server.models import Model

__all__ = [
    "DONE",
    "LastCall",
    "choices_opening",
    "event_head",
    "finish_reason",
    "head",
    "request_options",
    "usage_event",
    "usage_of",
    "wants_usage",
]

#: What ends a stream of events.
DONE: Final = b"data: [DONE]\n\n"


class LastCall:
    """The arguments of the call that an answer makes last."""

    def __init__(self, calls: Iterable[ToolCall] = ()) -> None:
        self._parts: list[str] = []
        self.add(calls)

    def add(self, calls: Iterable[ToolCall | ToolCallDelta]) -> None:
        for each in calls:
            if each.id is not None:
                self._parts.clear()
            self._parts.append(each.arguments)

    @property
    def whole(self) -> bool | None:
        """Whether it was not cut short; None without a call."""
        if not self._parts:
            return None
        try:
            json.loads("".join(self._parts))
        except (ValueError, RecursionError):
            return False
        return True


def head(call: Call, model: Model, kind: str, prefix: str) -> dict[str, Any]:
    """The fields with which an answer, and each of its events, begins."""
    return {
        "id": f"{prefix}-{call.id}",
        "object": kind,
        "created": int(time.time()),
        "model": model.name,
    }


def event_head(call: Call, model: Model, kind: bytes, prefix: bytes) -> bytes:
    """`head` as each event of a stream begins."""
    # A JSON encoder, which is made for each object, takes twice as long.
    values = prefix, call.id.encode(), kind, int(time.time()), json_bytes(model.name)
    return b'data: {"id":"%b-%b","object":"%b","created":%d,"model":%b' % values


def choices_opening(head: bytes, usage: bool) -> bytes:
    """How each event begins that has one choice; `]}` and an empty line end it. `usage`: whether
    another event has that."""
    return head + (b',"usage":null,"choices":[' if usage else b',"choices":[')


def usage_event(head: bytes, usage: Usage | None) -> bytes:
    """The event that has the usage."""
    return b'%b,"usage":%b,"choices":[]}\n\n' % (head, json_bytes(usage_of(usage)))


def usage_of(usage: Usage | None) -> dict[str, Any]:
    usage = usage or Usage()
    return {
        "prompt_tokens": usage.prompt_tokens,
        "completion_tokens": usage.completion_tokens,
        "total_tokens": usage.prompt_tokens + usage.completion_tokens,
        "prompt_tokens_details": {"cached_tokens": usage.cached_tokens},
        "completion_tokens_details": {
            "reasoning_tokens": usage.reasoning_tokens,
            "accepted_prediction_tokens": usage.accepted_tokens,
            "rejected_prediction_tokens": usage.rejected_tokens,
        },
    }


def finish_reason(reason: str | None, called: bool | None = False) -> str | None:
    """A finish reason in OpenAI's words. `called`: whether the answer ends with a whole call."""
    if called and reason == "stop":
        return "tool_calls"
    return {"stopped": "stop", "repetition": "length"}.get(reason or "", reason)


def wants_usage(body: Mapping[str, Any]) -> bool:
    """Whether `stream_options` asks for a last event with the usage. Raises `InvalidRequest`."""
    options = body.get("stream_options", {})
    if not isinstance(options, dict):
        raise InvalidRequest("stream_options", options, "must be an object")
    wanted = options.get("include_usage") or False
    if not isinstance(wanted, bool):
        raise InvalidRequest("stream_options.include_usage", wanted, "must be true or false")
    return wanted


def request_options(call: Call, model: Model) -> dict[str, Any]:
    """The options of `Engine.stream` that follow from the key and the model's name."""
    key = call.key
    return {"cache_scope": key.cache_scope, "priority": key.priority, "adapter": model.adapter}
