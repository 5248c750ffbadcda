"""Converts LlamaIndex's messages to the engine's, and the engine's answers to LlamaIndex's."""

from __future__ import annotations

import json
from collections.abc import Sequence
from contextlib import suppress
from typing import Any

from asyncinfer.chunk import Chunk, Completion
from asyncinfer.errors import InvalidRequest

try:
    from llama_index.core.base.llms.types import (
        ChatMessage,
        ChatResponse,
        MessageRole,
        TextBlock,
        ThinkingBlock,
        ToolCallBlock,
    )
    from llama_index.core.llms.utils import parse_partial_json
except ModuleNotFoundError as error:
    raise ModuleNotFoundError(
        'this needs LlamaIndex: pip install "asyncinfer[llama-index]"', name=error.name
    ) from error

__all__ = ["Answer", "arguments", "chat_messages", "whole"]

#: LlamaIndex's roles -> the names that chat templates have for them, where these differ.
_ROLES = {"developer": "system", "model": "assistant", "chatbot": "assistant", "function": "tool"}


def chat_messages(messages: Sequence[ChatMessage]) -> list[dict[str, Any]]:
    """Messages for `Engine.stream`. Raises `InvalidRequest`, naming the place."""
    return [_message(f"messages[{index}]", message) for index, message in enumerate(messages)]


def whole(done: Completion) -> ChatResponse:
    """A whole answer as LlamaIndex's response."""
    calls = [(call.id, call.name, call.arguments) for call in done.tool_calls]
    usage = {
        "prompt_tokens": done.usage.prompt_tokens,
        "completion_tokens": done.usage.completion_tokens,
        "total_tokens": done.usage.prompt_tokens + done.usage.completion_tokens,
        "cached_tokens": done.usage.cached_tokens,
    }
    message = _answer(done.reasoning, done.text, calls)
    return ChatResponse(message=message, raw=done, additional_kwargs=usage)


class Answer:
    """A growing answer: each item of LlamaIndex's streams repeats it from the beginning."""

    def __init__(self) -> None:
        self._text = ""
        self._reasoning = ""
        self._calls: list[tuple[str, str, str]] = []

    def with_chunk(self, chunk: Chunk) -> ChatResponse:
        """The answer so far, after one more chunk."""
        self._text += chunk.text
        self._reasoning += chunk.reasoning
        for call in chunk.tool_calls:
            if call.id is not None:
                self._calls.append((call.id, call.name or "", call.arguments))
            else:
                call_id, name, arguments = self._calls[call.index]
                self._calls[call.index] = (call_id, name, arguments + call.arguments)
        message = _answer(self._reasoning, self._text, self._calls)
        thought = {"thinking_delta": chunk.reasoning} if chunk.reasoning else {}
        return ChatResponse(message=message, delta=chunk.text, raw=chunk, additional_kwargs=thought)


def _answer(reasoning: str, text: str, calls: Sequence[tuple[str, str, str]]) -> ChatMessage:
    blocks: list[Any] = []
    if reasoning:
        blocks.append(ThinkingBlock(content=reasoning))
    if text or not calls:
        blocks.append(TextBlock(text=text))
    for call_id, name, arguments in calls:
        blocks.append(
            ToolCallBlock(tool_call_id=call_id, tool_name=name, tool_kwargs=_object(arguments))
        )
    more = {"tool_calls": [_called(*call) for call in calls]} if calls else {}
    return ChatMessage(role=MessageRole.ASSISTANT, blocks=blocks, additional_kwargs=more)


def _called(call_id: str | None, name: str, arguments: Any) -> dict[str, Any]:
    """A call as OpenAI has it. LlamaIndex looks for it where it streams structured answers."""
    return {"id": call_id, "type": "function", "function": {"name": name, "arguments": arguments}}


def arguments(call: ToolCallBlock, raw: object) -> dict[str, Any]:
    """The arguments of a call, whose answer was made of `raw`."""
    if isinstance(call.tool_kwargs, dict):
        return call.tool_kwargs
    if isinstance(raw, Chunk) and raw.finish_reason is None:
        with suppress(ValueError, RecursionError):
            found = parse_partial_json(call.tool_kwargs)
            return found if isinstance(found, dict) else {}
    return {}


def _object(arguments: str) -> dict[str, Any] | str:
    """The arguments of a call as an object; as text where they were cut short."""
    try:
        found = json.loads(arguments)
    except (ValueError, RecursionError):
        return arguments
    return found if isinstance(found, dict) else arguments


def _message(where: str, message: ChatMessage) -> dict[str, Any]:
    role = message.role.value
    made: dict[str, Any] = {"role": _ROLES.get(role, role)}
    texts, thoughts, calls = [], [], []
    for index, block in enumerate(message.blocks):
        match block:
            case TextBlock():
                texts.append(block.text)
            case ThinkingBlock():
                thoughts.append(block.content or "")
            case ToolCallBlock():
                calls.append(_called(block.tool_call_id, block.tool_name, block.tool_kwargs))
            case _:
                place = f"{where}.blocks[{index}]"
                raise InvalidRequest(place, block.block_type, "must be 'text'")
    made["content"] = "".join(texts)
    if any(thoughts):
        made["reasoning_content"] = "".join(thoughts)
    # Older versions of LlamaIndex have calls in no block.
    if calls := calls or message.additional_kwargs.get("tool_calls"):
        made["tool_calls"] = calls
    if "tool_call_id" in message.additional_kwargs:
        made["tool_call_id"] = message.additional_kwargs["tool_call_id"]
    return made
