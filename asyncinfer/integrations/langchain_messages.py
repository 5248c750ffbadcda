"""Messages of LangChain as the engine's, and the engine's answers as LangChain's."""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Sequence
from typing import Any

from asyncinfer.chunk import Choice, Chunk, TokenLogprob, Usage
from asyncinfer.errors import InvalidRequest
from asyncinfer.integrations.engines import AnyEngine

try:
    from langchain_core.messages import (
        AIMessage,
        AIMessageChunk,
        BaseMessage,
        ChatMessage,
        HumanMessage,
        SystemMessage,
        ToolMessage,
    )
    from langchain_core.messages.ai import InputTokenDetails, OutputTokenDetails, UsageMetadata
    from langchain_core.messages.tool import invalid_tool_call, tool_call, tool_call_chunk
    from langchain_core.outputs import ChatGenerationChunk
    from langchain_core.utils.json import parse_partial_json
except ModuleNotFoundError as error:
    raise ModuleNotFoundError(
        'this needs LangChain: pip install "asyncinfer[langchain]"', name=error.name
    ) from error

__all__ = ["AnswerChunks", "answer", "chat_messages"]

#: Blocks of an assistant's content that say again what its `tool_calls` say.
_CALLS = ("tool_call", "tool_call_chunk", "invalid_tool_call", "tool_use")
#: Brackets that close what is not open. One suits each state in which arguments may end: within an
#: object or a list, a string of either, or an escape of such a string.
_ENDINGS = ("]", "}", '"]', '"}', '""]', '""}')


def chat_messages(messages: Sequence[BaseMessage]) -> list[dict[str, Any]]:
    """Messages for `Engine.stream`. Raises `InvalidRequest`, naming the place."""
    return [_message(f"messages[{index}]", message) for index, message in enumerate(messages)]


def answer(engine: AnyEngine, choice: Choice, usage: Usage | None) -> AIMessage:
    """A whole answer. Calls whose arguments are no JSON object are `invalid_tool_calls`."""
    calls, invalid = [], []
    for call in choice.tool_calls:
        if isinstance(call.parsed, dict):
            calls.append(tool_call(name=call.name, args=call.parsed, id=call.id))
        else:
            error = "the arguments are no JSON object"
            invalid.append(
                invalid_tool_call(name=call.name, args=call.arguments, id=call.id, error=error)
            )
    return AIMessage(
        content=choice.text,
        additional_kwargs=_reasoning(choice.reasoning),
        tool_calls=calls,
        invalid_tool_calls=invalid,
        usage_metadata=None if usage is None else _usage(usage),
        response_metadata={
            "model_name": engine.model.name,
            "finish_reason": choice.finish_reason,
            **_scored(engine, choice.logprobs),
        },
    )


class AnswerChunks:
    """Makes the chunks of one streamed answer."""

    def __init__(self, engine: AnyEngine) -> None:
        self._engine = engine
        self._reason: str | None = None
        #: The arguments of each call, as far as they have come.
        self._arguments: defaultdict[int, list[str]] = defaultdict(list)

    def of(self, chunk: Chunk) -> ChatGenerationChunk:
        """What a chunk adds."""
        self._reason = chunk.finish_reason
        calls = []
        for each in chunk.tool_calls:
            self._arguments[each.index].append(each.arguments)
            made = tool_call_chunk(
                name=each.name, args=each.arguments, id=each.id, index=each.index
            )
            calls.append(made)
        return ChatGenerationChunk(
            message=AIMessageChunk(
                content=chunk.text,
                additional_kwargs=_reasoning(chunk.reasoning),
                tool_call_chunks=calls,
                response_metadata=_scored(self._engine, chunk.logprobs),
            )
        )

    def end(self, usage: Usage | None) -> ChatGenerationChunk:
        """The last one, without text. LangChain completes arguments that were cut short, and then
        calls the tool with them: what it cannot complete is added to those."""
        calls = []
        for index, parts in self._arguments.items():
            if ending := _spoiling("".join(parts)):
                calls.append(tool_call_chunk(name=None, args=ending, id=None, index=index))
        return ChatGenerationChunk(
            message=AIMessageChunk(
                content="",
                tool_call_chunks=calls,
                usage_metadata=_usage(usage or Usage()),
                response_metadata={
                    "model_name": self._engine.model.name,
                    "finish_reason": self._reason,
                },
                chunk_position="last",
            )
        )


def _message(where: str, message: BaseMessage) -> dict[str, Any]:
    made: dict[str, Any] = {"role": _role(where, message)}
    if message.name:
        made["name"] = message.name
    texts, thoughts = [], []
    for index, block in enumerate(message.content_blocks):
        kind = block["type"]
        # What LangChain has no type for is as the caller wrote it.
        inner: Any = block["value"] if block["type"] == "non_standard" else block
        if kind == "text":
            texts.append({"type": "text", "text": inner["text"]})
        elif kind == "reasoning":
            thoughts.append(inner.get("reasoning", ""))
        elif not (isinstance(message, AIMessage) and inner.get("type") in _CALLS):
            place = f"{where}.content[{index}].type"
            raise InvalidRequest(place, inner.get("type"), "must be 'text' or 'reasoning'")
    if len(texts) == 1:
        made["content"] = texts[0]["text"]
    else:
        made["content"] = texts or ""
    if any(thoughts):
        made["reasoning_content"] = "".join(thoughts)
    if isinstance(message, ToolMessage):
        made["tool_call_id"] = message.tool_call_id
    if isinstance(message, AIMessage) and (calls := _calls(message)):
        made["tool_calls"] = calls
    return made


def _role(where: str, message: BaseMessage) -> str:
    match message:
        case HumanMessage():
            return "user"
        case SystemMessage():
            return "system"
        case AIMessage():
            return "assistant"
        case ToolMessage():
            return "tool"
        case ChatMessage():
            return str(message.role)
    bound = "must be a system, human, AI, tool or chat message"
    raise InvalidRequest(where, type(message).__name__, bound)


def _calls(message: AIMessage) -> list[dict[str, Any]]:
    """The calls of an answer, those that are no JSON as they were written."""
    return [
        {
            "id": call["id"],
            "type": "function",
            "function": {"name": call["name"], "arguments": call["args"]},
        }
        for call in (*message.tool_calls, *message.invalid_tool_calls)
    ]


def _spoiling(arguments: str) -> str:
    """The text after which arguments are an object in no reading of LangChain's; empty if they are
    a JSON object."""
    try:
        if isinstance(json.loads(arguments), dict):
            return ""
    except (ValueError, RecursionError):
        pass
    return next(ending for ending in _ENDINGS if not _completed(arguments + ending))


def _completed(arguments: str) -> bool:
    """Whether LangChain makes an object of the arguments."""
    try:
        return isinstance(parse_partial_json(arguments), dict)
    except (ValueError, RecursionError):
        return False


def _scored(engine: AnyEngine, logprobs: Sequence[TokenLogprob]) -> dict[str, Any]:
    """Logprobs, if there are any, in the form and at the place of LangChain's model for OpenAI."""
    if not logprobs:
        return {}
    tokenizer = engine.tokenizer

    def token(token_id: int, logprob: float) -> dict[str, Any]:
        text = tokenizer.decode([token_id], skip_special_tokens=False)
        raw = tokenizer.token_bytes(token_id)
        told = list(text.encode() if raw is None else raw)
        return {"token": text, "bytes": told, "logprob": logprob}

    content = [
        {**token(each.token_id, each.logprob), "top_logprobs": [token(*pair) for pair in each.top]}
        for each in logprobs
    ]
    return {"logprobs": {"content": content, "refusal": None}}


def _reasoning(text: str) -> dict[str, Any]:
    """LangChain reads a reasoning block out of this."""
    return {"reasoning_content": text} if text else {}


def _usage(usage: Usage) -> UsageMetadata:
    return UsageMetadata(
        input_tokens=usage.prompt_tokens,
        output_tokens=usage.completion_tokens,
        total_tokens=usage.prompt_tokens + usage.completion_tokens,
        input_token_details=InputTokenDetails(cache_read=usage.cached_tokens),
        output_token_details=OutputTokenDetails(reasoning=usage.reasoning_tokens),
    )
