"""Messages of OpenAI's chats as the engine takes them."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any, Final

from asyncinfer.checks import check_string
from asyncinfer.errors import InvalidRequest
from asyncinfer.server.body import NoNumber, parsed
from asyncinfer.server.fields import check_names
from asyncinfer.text.messages import unread

__all__ = ["call_arguments", "chat_messages", "prediction_text", "response_format", "text_part"]

#: Fields of `response_format`. Chats have all but the first two below the second.
_FORMAT: Final = ("type", "json_schema", "schema", "name", "description", "strict")


def chat_messages(messages: Any) -> list[dict[str, Any]]:
    """A list of messages for `Engine.stream`. Raises `InvalidRequest`, naming the place."""
    if not isinstance(messages, list) or not messages:
        raise InvalidRequest("messages", messages, "must be a list with a message at least")
    return [_message(f"messages[{index}]", message) for index, message in enumerate(messages)]


def _message(where: str, message: Any) -> dict[str, Any]:
    if not isinstance(message, dict):
        raise InvalidRequest(where, message, "must be an object with role and content")
    made = {name: value for name, value in message.items() if value is not None}
    if made.get("role") == "developer":
        # OpenAI's new name, which templates do not know.
        made["role"] = "system"
    if isinstance(made.get("content"), list):
        made["content"] = [
            text_part(f"{where}.content[{index}]", part)
            for index, part in enumerate(made["content"])
        ]
    if "tool_calls" in made:
        made["tool_calls"] = _calls(f"{where}.tool_calls", made["tool_calls"])
    return made


def text_part(where: str, part: Any) -> dict[str, str]:
    """A part of a message, which has to be text. Raises `InvalidRequest`, naming what it is
    instead."""
    if not isinstance(part, Mapping):
        raise InvalidRequest(where, part, "must be an object with type and text")
    kind = part.get("type")
    if kind in ("text", "input_text", "output_text"):
        text = part.get("text")
    elif kind == "refusal":
        text = part.get("refusal")
    else:
        raise unread(f"{where}.type", kind)
    return {"type": "text", "text": check_string(f"{where}.text", text)}


def _calls(where: str, calls: Any) -> list[Any]:
    """Tool calls as templates take them."""
    if not isinstance(calls, list):
        raise InvalidRequest(where, calls, "must be a list")
    made = []
    for index, call in enumerate(calls):
        function = call.get("function") if isinstance(call, Mapping) else None
        if not isinstance(function, Mapping) or not isinstance(function.get("name"), str):
            raise InvalidRequest(f"{where}[{index}]", call, "must be a call of a function")
        arguments = call_arguments(
            f"{where}[{index}].function.arguments", function.get("arguments", "{}")
        )
        made.append({**call, "function": {**function, "arguments": arguments}})
    return made


def call_arguments(where: str, value: Any) -> Any:
    """A call's arguments as an object, since templates write the JSON themselves. What is no JSON
    stays a text: answers that were cut short, or that have `NaN`, have such. Raises
    `InvalidRequest`."""
    if not isinstance(value, str):
        return value
    try:
        return parsed(value or "{}")
    except (json.JSONDecodeError, NoNumber, RecursionError):
        return value
    except ValueError as error:
        raise InvalidRequest(where, value, f"cannot be read: {error}") from None


def prediction_text(value: Any) -> str:
    """The text of OpenAI's `prediction`. Raises `InvalidRequest`."""
    content = value.get("content") if isinstance(value, Mapping) else None
    if isinstance(content, list):
        parts = [text_part(f"prediction.content[{i}]", part) for i, part in enumerate(content)]
        content = "".join(part["text"] for part in parts)
    if not isinstance(content, str):
        raise InvalidRequest("prediction", value, "must have content: a text or text parts")
    return content


def response_format(value: Any) -> dict[str, Any]:
    """The engine's options for OpenAI's `response_format`. Raises `InvalidRequest`."""
    kind = value.get("type") if isinstance(value, Mapping) else None
    if kind not in ("text", "json_object", "json_schema"):
        bound = "must have type 'text', 'json_object' or 'json_schema'"
        raise InvalidRequest("response_format", value, bound)
    check_names("response_format", value, _FORMAT)
    if kind == "json_object" and value.get("json_schema") is None:
        # Clients of llama.cpp have a schema beside it.
        schema = value.get("schema")
        if not isinstance(schema, Mapping | None):
            raise InvalidRequest("response_format.schema", schema, "must be an object")
        return {"json_schema": dict(schema)} if schema else {"json_object": True}
    if kind != "json_schema":
        for name in ("schema", "json_schema"):
            if value.get(name) is not None:
                bound = f"needs type 'json_schema': 'type' is {kind!r}"
                raise InvalidRequest(f"response_format.{name}", value[name], bound)
        return {}
    # The Responses protocol has the schema beside the type.
    holder = value.get("json_schema", value)
    schema = None
    if isinstance(holder, Mapping):
        check_names("response_format.json_schema", holder, _FORMAT)
        schema = holder.get("schema")
    if not isinstance(schema, Mapping):
        raise InvalidRequest("response_format.json_schema.schema", schema, "must be an object")
    return {"json_schema": dict(schema)}
