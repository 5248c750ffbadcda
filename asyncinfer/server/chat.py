"""`/v1/chat/completions`."""

from __future__ import annotations

from collections import defaultdict
from functools import partial
from typing import Any, Final

from asyncinfer.chunk import Completion
from asyncinfer.server.call import Call, json_bytes
from asyncinfer.server.chat_forms import chat_options, delta_bytes, message_of
from asyncinfer.server.fields import CHAT, check_fields, flag
from asyncinfer.server.logprobs import chat_logprobs, scored_bytes
from asyncinfer.server.models import Model, Models
from asyncinfer.server.prompts import chat_messages
from asyncinfer.server.usage import (
    ChoiceEvents,
    LastCall,
    finish_reason,
    head,
    request_options,
    stop_reason,
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
#: An event of one choice: its opening, index, delta, logprobs and finish reason.
_EVENT: Final = b'%b{"index":%d,"delta":%b,"logprobs":%b,"finish_reason":%b}]}\n\n'
_NULL: Final = b"null"
_BEGUN: Final = b'{"role":"assistant","content":""}'


class Chat:
    """Answers a chat."""

    def __init__(self, models: Models) -> None:
        self._models = models

    async def __call__(self, call: Call) -> None:
        body = call.body
        check_fields(body, CHAT)
        model = self._models.find(body.get("model"))
        messages = await call.offload(chat_messages, body["messages"])
        options = {**await call.offload(chat_options, body), **request_options(call, model)}
        usage = wants_usage(body)
        if flag(body, "stream"):
            await _events(call, model, messages, options, usage)
        else:
            done = await model.engine.generate(messages, **options)
            answer = partial(_answer, call, model, done, "logprobs" in options)
            await call.made(scored_bytes(options, done.usage), answer)


def _answer(call: Call, model: Model, done: Completion, logprobs: bool) -> dict[str, Any]:
    tokenizer = model.engine.tokenizer if logprobs else None
    choices = [
        {
            "index": choice.index,
            "message": message_of(choice),
            "logprobs": None if tokenizer is None else chat_logprobs(tokenizer, choice.logprobs),
            "finish_reason": finish_reason(choice.finish_reason, LastCall(choice.tool_calls).whole),
            **stop_reason(choice),
        }
        for choice in done.choices
    ]
    answer = head(call, model, "chat.completion", "chatcmpl")
    return {**answer, "choices": choices, "usage": usage_of(done.usage)}


async def _events(
    call: Call, model: Model, messages: list[Any], options: dict[str, Any], usage: bool
) -> None:
    events = ChoiceEvents(call, model, b"chat.completion.chunk", b"chatcmpl", usage)
    opening, scored = events.opening, "logprobs" in options
    last: defaultdict[int, LastCall] = defaultdict(LastCall)
    async with model.engine.stream(messages, **options) as stream:
        async for chunk in stream:
            if not call.begun:
                # Clients expect choices to appear in order.
                for index in range(options.get("n", 1)):
                    call.raw_events(_EVENT % (opening, index, _BEGUN, _NULL, _NULL))
            index = chunk.index
            if chunk.tool_calls:
                last[index].add(chunk.tool_calls)
            delta, scores = delta_bytes(chunk), _NULL
            if scored and chunk.logprobs:
                scores = json_bytes(chat_logprobs(model.engine.tokenizer, chunk.logprobs))
            if delta or scores is not _NULL:
                call.raw_events(_EVENT % (opening, index, delta or b"{}", scores, _NULL))
            if chunk.finish_reason is not None:
                reason = json_bytes(finish_reason(chunk.finish_reason, last[index].whole))
                if chunk.stop_reason is not None:
                    reason += b',"stop_reason":%b' % json_bytes(chunk.stop_reason)
                call.raw_events(_EVENT % (opening, index, b"{}", _NULL, reason))
            if call.is_due(stream.ready):
                await call.flush()
    await events.end(stream.usage)
