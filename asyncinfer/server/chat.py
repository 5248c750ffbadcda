"""`/v1/chat/completions`."""

from __future__ import annotations

from typing import Any, Final

from asyncinfer.chunk import Completion
from asyncinfer.server.call import Call, json_bytes
from asyncinfer.server.chat_forms import chat_options, delta_of, message_of
from asyncinfer.server.fields import CHAT, check_fields, flag
from asyncinfer.server.logprobs import chat_logprobs
from asyncinfer.server.models import Model, Models
from asyncinfer.server.prompts import chat_messages
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
        options = {**await call.beside(chat_options, body), **request_options(call, model)}
        usage = wants_usage(body)
        if flag(body, "stream"):
            await _events(call, model, messages, options, usage)
        else:
            done = await model.engine.generate(messages, **options)
            await call.json(_answer(call, model, done, "logprobs" in options))


def _answer(call: Call, model: Model, done: Completion, logprobs: bool) -> dict[str, Any]:
    tokenizer = model.engine.tokenizer
    choices = [
        {
            "index": choice.index,
            "message": message_of(choice),
            "logprobs": chat_logprobs(tokenizer, choice.logprobs) if logprobs else None,
            "finish_reason": finish_reason(choice.finish_reason, bool(choice.tool_calls)),
        }
        for choice in done.choices
    ]
    answer = head(call, model, "chat.completion", "chatcmpl")
    return {**answer, "choices": choices, "usage": usage_of(done.usage)}


async def _events(
    call: Call, model: Model, messages: list[Any], options: dict[str, Any], usage: bool
) -> None:
    first = head(call, model, "chat.completion.chunk", "chatcmpl")
    if usage:
        first["usage"] = None
    opening = json_bytes(first)[:-1]

    async def tell(index: int, delta: dict[str, Any], **fields: Any) -> None:
        choice = {"index": index, "delta": delta, "logprobs": None, "finish_reason": None, **fields}
        await call.choice_event(opening, choice)

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
            delta = delta_of(chunk)
            if delta or logprobs:
                await tell(chunk.index, delta, **logprobs)
            if chunk.finish_reason is not None:
                reason = finish_reason(chunk.finish_reason, chunk.index in called)
                await tell(chunk.index, {}, finish_reason=reason)
        if usage:
            await call.event({**first, "choices": [], "usage": usage_of(stream.usage)})
    await call.raw_event(DONE)
    await call.end()
