"""OpenAI's forms of a chat's options and answers."""

from __future__ import annotations

from typing import Any

from asyncinfer.chunk import Choice, Chunk, ToolCallDelta
from asyncinfer.errors import InvalidRequest
from asyncinfer.server.call import json_bytes, text_bytes
from asyncinfer.server.fields import CHAT, flag, options_of
from asyncinfer.server.prompts import prediction_text, response_format

__all__ = ["chat_options", "delta_bytes", "delta_of", "message_of"]


def chat_options(body: dict[str, Any]) -> dict[str, Any]:
    """The options of `Engine.stream` in the body of a chat request. Raises `InvalidRequest`."""
    options = options_of(body, CHAT)
    if "max_tokens" in body:
        options.setdefault("max_tokens", body["max_tokens"])
    if flag(body, "logprobs"):
        options["logprobs"] = body.get("top_logprobs", 0)
    elif body.get("top_logprobs"):
        raise InvalidRequest("top_logprobs", body["top_logprobs"], "needs logprobs=true")
    if "prediction" in body:
        options["prediction"] = prediction_text(body["prediction"])
    if "response_format" in body:
        options |= response_format(body["response_format"])
    return options


def message_of(choice: Choice) -> dict[str, Any]:
    """The assistant's message of a whole answer."""
    message: dict[str, Any] = {"role": "assistant", "content": choice.text, "refusal": None}
    if choice.tool_calls:
        message["content"] = choice.text or None
        message["tool_calls"] = [
            _call(call.id, name=call.name, arguments=call.arguments) for call in choice.tool_calls
        ]
    return message | _reasoning(choice.reasoning)


def _call(call_id: str, **function: str) -> dict[str, Any]:
    return {"id": call_id, "type": "function", "function": function}


def _reasoning(text: str) -> dict[str, str]:
    """The reasoning under both names that clients read."""
    return {"reasoning": text, "reasoning_content": text} if text else {}


def delta_bytes(chunk: Chunk) -> bytes:
    """The JSON of `delta_of`; empty where the chunk adds nothing."""
    if chunk.text and not chunk.reasoning and not chunk.tool_calls:
        # `json.dumps` makes an encoder for each object, which takes ten times as long.
        return b'{"content":%b}' % text_bytes(chunk.text)
    delta = delta_of(chunk)
    return json_bytes(delta) if delta else b""


def delta_of(chunk: Chunk) -> dict[str, Any]:
    """What a chunk adds to the message; empty where it adds nothing."""
    delta: dict[str, Any] = _reasoning(chunk.reasoning)
    if chunk.text:
        delta["content"] = chunk.text
    if chunk.tool_calls:
        delta["tool_calls"] = [_call_delta(each) for each in chunk.tool_calls]
    return delta


def _call_delta(delta: ToolCallDelta) -> dict[str, Any]:
    """A tool call's delta. Id and name come once, since clients concatenate all texts."""
    if delta.id is None:
        return {"index": delta.index, "function": {"arguments": delta.arguments}}
    function = {"name": delta.name or "", "arguments": delta.arguments}
    return {"index": delta.index, **_call(delta.id, **function)}
