"""Converts DSPy's requests to the engine's, and the engine's answers to DSPy's."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any, Final

from asyncinfer.chunk import Chunk, Completion, TokenLogprob, ToolCallDelta, Usage
from asyncinfer.engine import Engine, SyncEngine
from asyncinfer.errors import InvalidRequest
from asyncinfer.server.usage import LastCall, begun_before

try:
    from dspy import lm15
except ModuleNotFoundError as error:
    raise ModuleNotFoundError(
        'this needs DSPy: pip install "asyncinfer[dspy]"', name=error.name
    ) from error

__all__ = ["Events", "chat_of", "options_of", "response"]

#: Fields of a request's config that `Engine.stream` has by the same name.
_OPTIONS: Final = (
    *("max_tokens", "temperature", "top_p", "top_k", "seed", "logprobs"),
    *("frequency_penalty", "presence_penalty"),
)


def chat_of(request: lm15.Request) -> list[dict[str, Any]]:
    """Messages for `Engine.stream`. Raises `InvalidRequest`, naming the place."""
    made: list[dict[str, Any]] = []
    if request.system is not None:
        system = request.system
        text = system if isinstance(system, str) else _text("system", system)
        made.append({"role": "system", "content": text})
    for index, message in enumerate(request.messages):
        made.extend(_messages(f"messages[{index}]", message))
    return made


def options_of(request: lm15.Request) -> dict[str, Any]:
    """The options of `Engine.stream`: fields of the config, and extensions. Raises
    `InvalidRequest`."""
    config = request.config
    options = {name: getattr(config, name) for name in _OPTIONS}
    options = {name: value for name, value in options.items() if value is not None}
    if config.stop:
        options["stop"] = list(config.stop)
    if config.response_format is not None:
        form = config.response_format
        options |= {"json_schema": form["schema"]} if "schema" in form else {"json_object": True}
    if request.tools:
        options["tools"] = [_tool(f"tools[{i}]", tool) for i, tool in enumerate(request.tools)]
    if config.tool_choice is not None:
        options |= _choice(config.tool_choice)
    return {**options, **(config.extensions or {})}


def response(engine: Engine | SyncEngine, done: Completion) -> lm15.Response:
    """A whole answer. A call whose arguments were cut short has no arguments."""
    parts: list[Any] = []
    if done.reasoning:
        parts.append(lm15.ThinkingPart(done.reasoning))
    if done.text or not done.tool_calls:
        parts.append(lm15.TextPart(done.text))
    for call in done.tool_calls:
        arguments = call.parsed if isinstance(call.parsed, dict) else {}
        parts.append(lm15.ToolCallPart(id=call.id, name=call.name, input=arguments))
    return lm15.Response(
        id=done.request_id,
        model=engine.model.name,
        message=lm15.Message.assistant(parts),
        finish_reason=_reason(done.finish_reason, LastCall(done.tool_calls).whole),
        usage=_usage(done.usage),
        logprobs=_scores(engine, done.logprobs) or None,
    )


class Events:
    """Makes the events of one answer. Its reasoning, its text and each call are one part each."""

    def __init__(self, model: str) -> None:
        self._model = model
        self._begun = False
        #: What the open part holds, and how many parts came before it.
        self._part: object = None
        self._parts = -1
        self._last = LastCall()
        self._reason = "stop"

    def of(self, chunk: Chunk) -> Iterator[lm15.StreamEvent]:
        """The events of a chunk; the first chunk starts the answer."""
        if not self._begun:
            self._begun = True
            yield lm15.StreamStartEvent(model=self._model)
        more = begun_before(chunk.tool_calls)
        yield from map(self._called, chunk.tool_calls[:more])
        if chunk.reasoning:
            index = self._index("thinking")
            yield lm15.StreamDeltaEvent(lm15.ThinkingDelta(chunk.reasoning, part_index=index))
        if chunk.text:
            index = self._index("text")
            yield lm15.StreamDeltaEvent(lm15.TextDelta(chunk.text, part_index=index))
        yield from map(self._called, chunk.tool_calls[more:])
        self._reason = chunk.finish_reason or self._reason

    def end(self, usage: Usage | None) -> lm15.StreamEvent:
        return lm15.StreamEndEvent(
            finish_reason=_reason(self._reason, self._last.whole), usage=_usage(usage or Usage())
        )

    def _called(self, call: ToolCallDelta) -> lm15.StreamEvent:
        self._last.add([call])
        index = self._index(call.index)
        delta = lm15.ToolCallDelta(call.arguments, part_index=index, id=call.id, name=call.name)
        return lm15.StreamDeltaEvent(delta)

    def _index(self, part: object) -> int:
        if part != self._part:
            self._part = part
            self._parts += 1
        return self._parts


def _messages(where: str, message: lm15.Message) -> Iterator[dict[str, Any]]:
    """The engine's messages for one of DSPy's: each tool result in it becomes a message."""
    results = [part for part in message.parts if part.type == "tool_result"]
    for part in results:
        text = _text(f"{where}.parts", part.content)
        made = {"role": "tool", "tool_call_id": part.id, "content": text}
        yield made if part.name is None else {**made, "name": part.name}
    calls, thoughts, texts = [], [], []
    for part in message.parts:
        if part.type == "tool_call":
            function = {"name": part.name, "arguments": dict(part.input)}
            calls.append({"id": part.id, "type": "function", "function": function})
        elif part.type == "thinking":
            thoughts.append(part.text)
        elif part.type != "tool_result":
            texts.append(part)
    if len(results) == len(message.parts):
        return
    # DSPy has no role for the system within the messages.
    role = "system" if message.role == "developer" else message.role
    told: dict[str, Any] = {"role": role, "content": _text(f"{where}.parts", texts)}
    if thoughts:
        told["reasoning_content"] = "".join(thoughts)
    if calls:
        told["tool_calls"] = calls
    yield told


def _text(where: str, parts: Iterable[Any]) -> str:
    """The text of parts. Raises `InvalidRequest` for a part that is no text."""
    texts = []
    for index, part in enumerate(parts):
        if part.type not in ("text", "refusal"):
            raise InvalidRequest(f"{where}[{index}].type", part.type, "must be 'text'")
        texts.append(part.text)
    return "".join(texts)


def _tool(where: str, tool: Any) -> dict[str, Any]:
    if tool.type != "function":
        raise InvalidRequest(f"{where}.type", tool.type, "must be 'function'")
    about = {} if tool.description is None else {"description": tool.description}
    return {"name": tool.name, **about, "parameters": dict(tool.parameters)}


def _choice(choice: lm15.ToolChoice) -> dict[str, Any]:
    """The options for a `ToolChoice`. Raises `InvalidRequest` for a choice among several tools."""
    options: dict[str, Any] = {"tool_choice": choice.mode}
    if choice.allowed:
        if len(choice.allowed) > 1 or choice.mode != "required":
            bound = "must be one tool, with mode='required'"
            raise InvalidRequest("tool_choice.allowed", list(choice.allowed), bound)
        options["tool_choice"] = choice.allowed[0]
    if choice.parallel is not None:
        options["parallel_tool_calls"] = choice.parallel
    return options


def _reason(reason: str, called: bool | None) -> Any:
    """A finish reason in DSPy's words."""
    if reason in ("stop", "stopped"):
        return "tool_call" if called else "stop"
    return "length"


def _usage(usage: Usage) -> lm15.Usage:
    return lm15.Usage(
        input_tokens=usage.prompt_tokens,
        output_tokens=usage.completion_tokens,
        cache_read_tokens=usage.cached_tokens,
        reasoning_tokens=usage.reasoning_tokens,
    )


def _scores(
    engine: Engine | SyncEngine, logprobs: Iterable[TokenLogprob]
) -> tuple[lm15.TokenLogprob, ...]:
    def text(token: int) -> str:
        return engine.tokenizer.decode([token], skip_special_tokens=False)

    return tuple(
        lm15.TokenLogprob(
            token=text(each.token_id),
            token_id=each.token_id,
            logprob=each.logprob,
            top=tuple(
                lm15.TopLogprob(text(token), value, token_id=token) for token, value in each.top
            ),
        )
        for each in logprobs
    )
