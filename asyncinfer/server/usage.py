"""Parts of an answer that OpenAI's protocols share."""

from __future__ import annotations

import json
import time
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Final

from asyncinfer.chunk import Choice, Chunk, ToolCall, ToolCallDelta, Usage
from asyncinfer.errors import InvalidRequest
from asyncinfer.server.call import Call, json_bytes
from asyncinfer.server.fields import check_names
from asyncinfer.server.models import Model

__all__ = [
    "WHOLE_INTERVAL",
    "ChoiceEvents",
    "LastCall",
    "begun_before",
    "finish_reason",
    "head",
    "request_options",
    "stop_reason",
    "usage_of",
    "wants_usage",
]


#: Tokens of a chunk, where an answer is read for the order of its parts: a call has more of them,
#: so that no chunk has text on both sides of one.
WHOLE_INTERVAL: Final = 8
#: Fields of `stream_options`. The second asks for padding against eavesdroppers to be left out, and
#: there is none.
_STREAM_OPTIONS: Final = ("include_usage", "include_obfuscation")


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


def begun_before(calls: Sequence[ToolCallDelta]) -> int:
    """How many of a chunk's deltas go on with a call of an earlier chunk. They come before the
    chunk's text, and the others after it."""
    return next((at for at, each in enumerate(calls) if each.id is not None), len(calls))


def head(call: Call, model: Model, kind: str, prefix: str) -> dict[str, Any]:
    """The fields with which an answer, and each of its events, begins."""
    return {
        "id": f"{prefix}-{call.id}",
        "object": kind,
        "created": int(time.time()),
        "model": model.name,
    }


class ChoiceEvents:
    """What all events of one answer's choices have in common."""

    def __init__(self, call: Call, model: Model, kind: bytes, prefix: bytes, usage: bool) -> None:
        """`usage`: whether a last event has that."""
        # A JSON encoder, which is made for each object, takes twice as long.
        values = prefix, call.id.encode(), kind, int(time.time()), json_bytes(model.name)
        self._head = b'data: {"id":"%b-%b","object":"%b","created":%d,"model":%b' % values
        self._call = call
        self._usage = usage
        #: How each begins that has one choice; `]}` and an empty line end it.
        self.opening = self._head + (b',"usage":null,"choices":[' if usage else b',"choices":[')

    async def end(self, usage: Usage | None) -> None:
        """End the answer."""
        if self._usage:
            told = json_bytes(usage_of(usage))
            self._call.raw_events(b'%b,"usage":%b,"choices":[]}\n\n' % (self._head, told))
        await self._call.end(b"data: [DONE]\n\n")


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


def stop_reason(ended: Choice | Chunk) -> dict[str, Any]:
    """The field of vLLM's server that tells what ended a choice, where there is something."""
    return {} if ended.stop_reason is None else {"stop_reason": ended.stop_reason}


def wants_usage(body: Mapping[str, Any]) -> bool:
    """Whether `stream_options` asks for a last event with the usage. Raises `InvalidRequest`."""
    options = body.get("stream_options", {})
    if not isinstance(options, dict):
        raise InvalidRequest("stream_options", options, "must be an object")
    check_names("stream_options", options, _STREAM_OPTIONS)
    wanted = options.get("include_usage") or False
    if not isinstance(wanted, bool):
        raise InvalidRequest("stream_options.include_usage", wanted, "must be true or false")
    return wanted


def request_options(call: Call, model: Model) -> dict[str, Any]:
    """The options of `Engine.stream` that follow from the key and the model's name."""
    key = call.key
    return {"cache_scope": key.cache_scope, "priority": key.priority, "adapter": model.adapter}
