"""Messages of Anthropic's protocol as the engine takes them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from asyncinfer.checks import check_string
from asyncinfer.errors import InvalidRequest
from asyncinfer.server.prompts import text_part

__all__ = ["anthropic_chat"]

#: Claude Code's first system block, which differs in each request, so that no prefix would be
#: found in the cache.
_BILLING: Final = "x-anthropic-billing-header"


def anthropic_chat(body: Mapping[str, Any], places: list[str]) -> list[dict[str, Any]]:
    """The `system` and `messages` of a body as messages for `Engine.stream`. Adds to `places` where
    each of them began. Raises `InvalidRequest`, naming the place."""
    made = []
    system = _texts("system", body.get("system", []))
    kept = [text for text in system if not text.startswith(_BILLING)]
    if kept:
        made.append(("system", {"role": "system", "content": "\n".join(kept)}))
    messages = body.get("messages")
    if not isinstance(messages, list) or not messages:
        raise InvalidRequest("messages", messages, "must be a list with a message at least")
    for index, message in enumerate(messages):
        made.extend(_messages(f"messages[{index}]", message))
    # Last, because the places of errors raised above are those of the body.
    places.extend(place for place, _ in made)
    return [message for _, message in made]


def _messages(where: str, message: Any) -> list[tuple[str, dict[str, Any]]]:
    """The engine's messages for one of Anthropic's, each with its place: every tool result in it
    becomes a message."""
    if not isinstance(message, Mapping):
        raise InvalidRequest(where, message, "must be an object with role and content")
    role, content = message.get("role"), message.get("content")
    if role not in ("user", "assistant", "system"):
        raise InvalidRequest(f"{where}.role", role, "must be 'user', 'assistant' or 'system'")
    if isinstance(content, str):
        return [(where, {"role": role, "content": content})]
    if not isinstance(content, list):
        raise InvalidRequest(f"{where}.content", content, "must be a string or a list of blocks")
    made: list[tuple[str, dict[str, Any]]] = []
    texts: list[str] = []
    calls: list[dict[str, Any]] = []
    thoughts: list[str] = []
    for index, block in enumerate(content):
        place = f"{where}.content[{index}]"
        kind = block.get("type") if isinstance(block, Mapping) else None
        if kind == "tool_result":
            made.append((place, _result(place, block)))
        elif kind == "tool_use":
            calls.append(_call(place, block))
        elif kind == "thinking":
            thoughts.append(check_string(f"{place}.thinking", block.get("thinking")))
        elif kind != "redacted_thinking":
            texts.append(text_part(place, block)["text"])
    rest: dict[str, Any] = {"role": role, "content": "".join(texts)}
    if calls:
        rest["tool_calls"] = calls
    if thoughts:
        rest["reasoning_content"] = "".join(thoughts)
    # A message that holds only tool results needs no message besides these.
    if texts or calls or thoughts or not made:
        made.append((where, rest))
    return made


def _call(where: str, block: Mapping[str, Any]) -> dict[str, Any]:
    arguments = block.get("input")
    if isinstance(arguments, Mapping):
        arguments = dict(arguments)
    elif not isinstance(arguments, str):
        # A text is what some clients keep of an answer that was cut short.
        raise InvalidRequest(f"{where}.input", arguments, "must be an object")
    name = check_string(f"{where}.name", block.get("name"))
    function = {"name": name, "arguments": arguments}
    return {"id": block.get("id"), "type": "function", "function": function}


def _result(where: str, block: Mapping[str, Any]) -> dict[str, Any]:
    text = "\n".join(_texts(f"{where}.content", block.get("content", "")))
    if block.get("is_error"):
        text = f"Error: {text}"
    return {"role": "tool", "tool_call_id": block.get("tool_use_id"), "content": text}


def _texts(where: str, content: Any) -> list[str]:
    """A text, or text blocks."""
    if isinstance(content, str):
        return [content]
    if not isinstance(content, list):
        raise InvalidRequest(where, content, "must be a string or a list of text blocks")
    return [text_part(f"{where}[{index}]", part)["text"] for index, part in enumerate(content)]
