"""Input items of OpenAI's Responses protocol as the engine takes them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from asyncinfer.checks import check_string
from asyncinfer.errors import InvalidRequest
from asyncinfer.server.prompts import call_arguments, chat_messages, text_part
from asyncinfer.text.messages import plain

__all__ = ["response_chat"]


def response_chat(body: Mapping[str, Any], places: list[str]) -> list[dict[str, Any]]:
    """The `instructions` and `input` of a body as messages for `Engine.stream`. Adds to `places`
    where each of them began. Raises `InvalidRequest`, naming the place."""
    made: list[dict[str, Any]] = []
    instructions = body.get("instructions")
    if instructions is not None:
        made.append({"role": "system", "content": check_string("instructions", instructions)})
        places.append("instructions")
    given = body.get("input")
    if isinstance(given, str):
        places.append("input")
        return [*made, {"role": "user", "content": given}]
    if not isinstance(given, list) or not given:
        raise InvalidRequest("input", given, "must be a string, or a list with an item at least")
    for index, item in enumerate(given):
        _add(made, f"input[{index}]", item)
        if len(made) > len(places):
            places.append(f"input[{index}]")
    for message in made:
        for name in ("content", "reasoning_content"):
            if isinstance(message.get(name), list):
                message[name] = "".join(message[name])
    return chat_messages(made)


def _add(made: list[dict[str, Any]], where: str, item: Any) -> None:
    """Add an input item. An answer's items (what it thinks, says and calls) become one message."""
    if not isinstance(item, Mapping):
        raise InvalidRequest(where, item, "must be an object")
    match item.get("type", "message"):
        case "message":
            content = _text(f"{where}.content", item.get("content"))
            role = item.get("role")
            if role == "assistant":
                _assistant(made)["content"].append(content)
            else:
                made.append({"role": role, "content": content})
        case "reasoning":
            name = "content" if item.get("content") else "summary"
            parts = item.get(name) or []
            if not isinstance(parts, list):
                raise InvalidRequest(f"{where}.{name}", parts, "must be a list of text parts")
            text = "".join(str(part.get("text", "")) for part in parts if isinstance(part, Mapping))
            thoughts = _assistant(made).setdefault("reasoning_content", [])
            thoughts.append(plain(f"{where}.{name}", text))
        case "function_call":
            name = plain(f"{where}.name", check_string(f"{where}.name", item.get("name")))
            place = f"{where}.arguments"
            arguments = plain(place, call_arguments(place, item.get("arguments", "{}")))
            function = {"name": name, "arguments": arguments}
            call_id = plain(f"{where}.call_id", item.get("call_id"))
            call = {"id": call_id, "type": "function", "function": function}
            _assistant(made).setdefault("tool_calls", []).append(call)
        case "function_call_output":
            text = _text(f"{where}.output", item.get("output"))
            call_id = plain(f"{where}.call_id", item.get("call_id"))
            made.append({"role": "tool", "tool_call_id": call_id, "content": text})
        case kind:
            bound = "must be 'message', 'reasoning', 'function_call' or 'function_call_output'"
            raise InvalidRequest(f"{where}.type", kind, bound)


def _assistant(made: list[dict[str, Any]]) -> dict[str, Any]:
    """The assistant's message to which items are added. Its content and reasoning are lists of
    texts until the end, since a growing string is copied each time."""
    if not made or made[-1]["role"] != "assistant":
        made.append({"role": "assistant", "content": []})
    return made[-1]


def _text(where: str, value: Any) -> str:
    """A text, or text parts. They are valid Unicode: of the message that they become a part of, the
    engine could not tell which item is wrong."""
    if not isinstance(value, str):
        if not isinstance(value, list):
            raise InvalidRequest(where, value, "must be a string or a list of text parts")
        parts = [text_part(f"{where}[{index}]", part)["text"] for index, part in enumerate(value)]
        value = "".join(parts)
    return str(plain(where, value))
