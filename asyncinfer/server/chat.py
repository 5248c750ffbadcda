"""`/v1/chat/completions`."""

from __future__ import annotations

from typing import Any, Final

from asyncinfer.chunk import Choice, Chunk, Completion, ToolCallDelta
from asyncinfer.errors import InvalidRequest
from asyncinfer.server.call import Call
from asyncinfer.server.fields import CHAT, check_fields, flag, options_of
from asyncinfer.server.logprobs import chat_logprobs
from asyncinfer.server.models import Model, Models
from asyncinfer.server.prompts import chat_messages, prediction_text, response_format
from asyncinfer.server.usage import (
    DONE,
    finish_reason,
    head,
    request_options,
    usage_of,
    wants_usage,
)

__all__ = ["NAMES", "Chat"]

#: The request's names of the engine's options.
NAMES: Final = {
    "prompt": "messages",
    "logprobs": "top_logprobs",
    "json_schema": "response_format",
    "json_object": "response_format",
}


class Chat:
    """Answers a chat."""

    def __init__(self, models: Models) -> None:
        self._models = models

    async def __call__(self, call: Call) -> None:
        body = call.body
        check_fields(body, CHAT)
        model = self._models.find(body.get("model"))
        messages = await call.beside(chat_messages, body["messages"])
        options = {**await call.beside(_options, body), **request_options(call, model)}
        usage = wants_usage(body)
        if flag(body, "stream"):
            await _events(call, model, messages, options, usage)
        else:
            done = await model.engine.generate(messages, **options)
            await call.json(_answer(call, model, done, "logprobs" in options))


def _options(body: dict[str, Any]) -> dict[str, Any]:
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


def _answer(call: Call, model: Model, done: Completion, logprobs: bool) -> dict[str, Any]:
    tokenizer = model.engine.tokenizer
    choices = [
        {
            "index": choice.index,
            "message": _message(choice),
            "logprobs": chat_logprobs(tokenizer, choice.logprobs) if logprobs else None,
            "finish_reason": finish_reason(choice.finish_reason, bool(choice.tool_calls)),
        }
        for choice in done.choices
    ]
    answer = head(call, model, "chat.completion", "chatcmpl")
    return {**answer, "choices": choices, "usage": usage_of(done.usage)}


def _message(choice: Choice) -> dict[str, Any]:
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


async def _events(
    call: Call, model: Model, messages: list[Any], options: dict[str, Any], usage: bool
) -> None:
    first = head(call, model, "chat.completion.chunk", "chatcmpl")
    if usage:
        first["usage"] = None

    async def tell(index: int, delta: dict[str, Any], **fields: Any) -> None:
        choice = {"index": index, "delta": delta, "logprobs": None, "finish_reason": None, **fields}
        await call.event({**first, "choices": [choice]})

    called = set()
    async with model.engine.stream(messages, **options) as stream:
        async for chunk in stream:
            if chunk.tool_calls:
                called.add(chunk.index)
            if not call.started:
                # Clients expect the choices to be introduced in order.
                for index in range(options.get("n", 1)):
                    await tell(index, {"role": "assistant", "content": ""})
            logprobs = {}
            if "logprobs" in options and chunk.logprobs:
                logprobs["logprobs"] = chat_logprobs(model.engine.tokenizer, chunk.logprobs)
            delta = _delta(chunk)
            if delta or logprobs:
                await tell(chunk.index, delta, **logprobs)
            if chunk.finish_reason is not None:
                reason = finish_reason(chunk.finish_reason, chunk.index in called)
                await tell(chunk.index, {}, finish_reason=reason)
        if usage:
            await call.event({**first, "choices": [], "usage": usage_of(stream.usage)})
    await call.raw_event(DONE)
    await call.end()


def _delta(chunk: Chunk) -> dict[str, Any]:
    delta: dict[str, Any] = _reasoning(chunk.reasoning)
    if chunk.text:
        delta["content"] = chunk.text
    if chunk.tool_calls:
        delta["tool_calls"] = [_call_delta(each) for each in chunk.tool_calls]
    return delta


def _call_delta(delta: ToolCallDelta) -> dict[str, Any]:
    """A tool call's delta. Id and name come once, since clients concatenate the deltas of texts."""
    if delta.id is None:
        return {"index": delta.index, "function": {"arguments": delta.arguments}}
    function = {"name": delta.name or "", "arguments": delta.arguments}
    return {"index": delta.index, **_call(delta.id, **function)}
