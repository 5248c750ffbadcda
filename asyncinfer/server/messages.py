"""`/v1/messages` and `/v1/messages/count_tokens`, of Anthropic's protocol."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any, Final

from asyncinfer.chunk import Chunk, Completion, ToolCall, ToolCallDelta, Usage
from asyncinfer.errors import InvalidRequest
from asyncinfer.server.anthropic_prompts import anthropic_chat
from asyncinfer.server.call import Call
from asyncinfer.server.errors import HttpError
from asyncinfer.server.fields import MESSAGES, check_fields, field_list, flag, options_of
from asyncinfer.server.models import Model, Models
from asyncinfer.server.offload import offload
from asyncinfer.server.prompts import response_format
from asyncinfer.server.usage import WHOLE_INTERVAL, LastCall, begun_before, request_options

__all__ = ["NAMES", "Messages"]

#: The request's names of the engine's options.
NAMES: Final = {
    "prompt": "messages",
    "json_schema": "output_config.format",
    "response_format": "output_config.format",
}


class Messages:
    """Answers a chat, and counts its tokens."""

    def __init__(self, models: Models) -> None:
        self._models = models

    async def __call__(self, call: Call) -> None:
        body = call.body
        if "thread" in body:
            raise _unthreaded()
        check_fields(body, MESSAGES)
        if "max_tokens" not in body:
            raise InvalidRequest("max_tokens", None, "is missing")
        model = self._models.find(body.get("model"))
        chat = await call.offload(partial(anthropic_chat, places=call.places), body)
        options = {**await call.offload(_options, body), **request_options(call, model)}
        options.setdefault("continue_final_message", _is_begun(chat))
        answer = _Answer(call, model, options)
        if flag(body, "stream"):
            await answer.send(chat)
        else:
            await call.json(await answer.whole(chat))

    async def count(self, call: Call) -> None:
        body = call.body
        check_fields(body, MESSAGES)
        model = self._models.find(body.get("model"))
        chat = await call.offload(partial(anthropic_chat, places=call.places), body)
        tools = _tools(body).get("tools")
        begun = body.get("continue_final_message")
        counted = partial(
            model.engine.tokenizer.count,
            chat,
            tools=tools,
            template_options=body.get("template_options"),
            continue_final_message=_is_begun(chat) if begun is None else begun,
        )
        count = await offload(counted)
        await call.json({"input_tokens": count})


def _unthreaded() -> HttpError:
    """The refusal of a conversation that a server keeps. Anthropic's tool runner asks for one, and
    goes on without when it reads these details."""
    why = "thread: is not served: no conversation is kept; send all messages"
    details = {"error_code": "thread_unsupported_request", "unsupported": ["thread"]}
    return HttpError(400, "invalid_request_error", why, details=details)


def _is_begun(chat: list[dict[str, Any]]) -> bool:
    """Whether the last message is the beginning of the answer."""
    last = chat[-1]
    said = last["role"] == "assistant" and bool(last.get("content"))
    return said and not last.get("tool_calls")


def _options(body: Mapping[str, Any]) -> dict[str, Any]:
    options = {**options_of(body, MESSAGES), **_tools(body)}
    for at, stop in enumerate(field_list(body, "stop_sequences")):
        # Reasoning is followed by white space that is no part of the answer.
        if isinstance(stop, str) and stop.isspace():
            bound = "must contain more than white space"
            raise InvalidRequest(f"stop_sequences[{at}]", stop, bound)
    config = body.get("output_config", {})
    if not isinstance(config, Mapping):
        raise InvalidRequest("output_config", config, "must be an object")
    if config.get("format") is not None:
        options |= response_format(config["format"])
    return options


def _tools(body: Mapping[str, Any]) -> dict[str, Any]:
    """The engine's options for `tools` and `tool_choice`."""
    options: dict[str, Any] = {}
    if "tools" in body:
        options["tools"] = [
            _tool(f"tools[{index}]", tool) for index, tool in enumerate(field_list(body, "tools"))
        ]
    choice = body.get("tool_choice")
    if choice is None:
        return options
    kind = choice.get("type") if isinstance(choice, Mapping) else None
    if kind not in ("auto", "any", "none", "tool"):
        bound = "must have type 'auto', 'any', 'none' or 'tool'"
        raise InvalidRequest("tool_choice", choice, bound)
    named = {"name": choice.get("name")}
    options["tool_choice"] = {"any": "required", "tool": named}.get(kind, kind)
    name = "disable_parallel_tool_use"
    alone = choice.get(name)
    if alone is not None and not isinstance(alone, bool):
        raise InvalidRequest(f"tool_choice.{name}", alone, "must be true or false")
    if alone:
        options["parallel_tool_calls"] = False
    return options


def _tool(where: str, tool: Any) -> dict[str, Any]:
    if not isinstance(tool, Mapping):
        raise InvalidRequest(where, tool, "must be an object")
    kind = tool.get("type", "custom")
    if kind != "custom":
        bound = "must be 'custom': there are no tools of the server's"
        raise InvalidRequest(f"{where}.type", kind, bound)
    return {name: tool[name] for name in ("name", "description", "input_schema") if name in tool}


class _Answer:
    """The answer to one request, whole or as events."""

    def __init__(self, call: Call, model: Model, options: dict[str, Any]) -> None:
        self._call = call
        self._model = model
        self._options = options
        #: The type of the content block that is being sent, and the number of those before it.
        self._block: str | None = None
        self._blocks = 0
        self._last = LastCall()
        #: The content blocks of an answer that is sent as a whole, each with its texts.
        self._kept: list[tuple[dict[str, Any], list[str]]] | None = None

    async def whole(self, chat: list[dict[str, Any]]) -> dict[str, Any]:
        if self._options.get("tools"):
            # A completion does not tell what was said before which call.
            self._kept = []
            self._options.setdefault("stream_interval", WHOLE_INTERVAL)
            stopped, usage = await self._read(chat)
            return {**self._message(self._content(), usage), **stopped}
        done = await self._model.engine.generate(chat, **self._options)
        content: list[dict[str, Any]] = []
        if done.reasoning:
            content.append({"type": "thinking", "thinking": done.reasoning, "signature": ""})
        content.append({"type": "text", "text": done.text})
        return {**self._message(content, _usage(done.usage)), **self._ended(done)}

    def _content(self) -> list[dict[str, Any]]:
        """The blocks that were kept."""
        content = []
        for block, parts in self._kept or ():
            text = "".join(parts)
            if block["type"] == "tool_use":
                arguments = ToolCall(block["id"], block["name"], text).parsed
                content.append({**block, "input": arguments if isinstance(arguments, dict) else {}})
            else:
                content.append({**block, block["type"]: text})
        if all(block["type"] == "thinking" for block in content):
            content.append({"type": "text", "text": ""})
        return content

    async def send(self, chat: list[dict[str, Any]]) -> None:
        stopped, usage = await self._read(chat)
        self._event("message_delta", delta=stopped, usage=usage)
        self._event("message_stop")
        await self._call.end()

    async def _read(self, chat: list[dict[str, Any]]) -> tuple[dict[str, Any], dict[str, Any]]:
        """Make the blocks, with their events. Returns why the answer ended, and what it took."""
        engine, call = self._model.engine, self._call
        stopped = _stopped("end_turn", None)
        async with engine.stream(chat, **self._options) as stream:
            async for chunk in stream:
                if self._kept is None and not call.begun:
                    # How much of the prompt was cached is known only at the end.
                    usage = _usage(Usage(prompt_tokens=stream.prompt_tokens or 0))
                    message = {**self._message([], usage), **_stopped(None, None)}
                    self._event("message_start", message=message)
                calls, more = chunk.tool_calls, begun_before(chunk.tool_calls)
                for each in calls[:more]:
                    self._call_delta(each)
                self._last.add(calls)
                if chunk.finish_reason is not None:
                    stopped = self._ended(chunk)
                thinking = self._begun("thinking", chunk.reasoning)
                text = self._begun("text", chunk.text)
                if thinking:
                    delta = {"type": "thinking_delta", "thinking": thinking}
                    self._delta("thinking", {"thinking": "", "signature": ""}, delta, thinking)
                if text:
                    delta = {"type": "text_delta", "text": text}
                    self._delta("text", {"text": ""}, delta, text)
                for each in calls[more:]:
                    self._call_delta(each)
                if call.is_due(stream.ready):
                    await call.flush()
            self._close()
            return stopped, _usage(stream.usage or Usage())

    def _message(self, content: list[Any], usage: dict[str, Any]) -> dict[str, Any]:
        return {
            "id": f"msg_{self._call.id}",
            "type": "message",
            "role": "assistant",
            "model": self._model.name,
            "content": content,
            "usage": usage,
        }

    def _ended(self, last: Completion | Chunk) -> dict[str, Any]:
        """Why the answer ended."""
        if last.finish_reason not in ("stop", "stopped"):
            return _stopped("max_tokens", None)
        if isinstance(last.stop_reason, str):
            return _stopped("stop_sequence", last.stop_reason)
        return _stopped("tool_use" if self._last.whole else "end_turn", None)

    def _call_delta(self, each: ToolCallDelta) -> None:
        if each.id is not None:
            # Each call is a block of its own, also directly after another call.
            self._close()
            empty: dict[str, Any] = {"id": each.id, "name": each.name, "input": {}}
            self._delta("tool_use", empty, {"type": "input_json_delta", "partial_json": ""}, "")
        if each.arguments:
            delta = {"type": "input_json_delta", "partial_json": each.arguments}
            self._delta("tool_use", {}, delta, each.arguments)

    def _begun(self, kind: str, text: str) -> str:
        """Text of this type. The white space that parts it from another block is no part of it."""
        return text if self._block == kind or not self._blocks else text.lstrip()

    def _delta(self, kind: str, empty: dict[str, Any], delta: dict[str, Any], text: str) -> None:
        """Send or keep more of a content block of this type; the first delta opens the block with
        `empty`. `text` is what the delta adds."""
        if self._block != kind:
            self._close()
            self._block = kind
            block = {"type": kind, **empty}
            if self._kept is not None:
                self._kept.append((block, []))
            self._event("content_block_start", index=self._blocks, content_block=block)
        if self._kept is not None:
            self._kept[-1][1].append(text)
        self._event("content_block_delta", index=self._blocks, delta=delta)

    def _close(self) -> None:
        """End the content block that is being sent."""
        if self._block is not None:
            self._event("content_block_stop", index=self._blocks)
            self._block = None
            self._blocks += 1

    def _event(self, kind: str, **fields: Any) -> None:
        if self._kept is None:
            self._call.event({"type": kind, **fields}, kind)


def _stopped(reason: str | None, stop: str | None) -> dict[str, Any]:
    return {"stop_reason": reason, "stop_sequence": stop}


def _usage(usage: Usage) -> dict[str, Any]:
    """The usage as Anthropic counts it: cached tokens apart from the others."""
    return {
        "input_tokens": usage.prompt_tokens - usage.cached_tokens,
        "cache_creation_input_tokens": 0,
        "cache_read_input_tokens": usage.cached_tokens,
        "output_tokens": usage.completion_tokens,
    }
