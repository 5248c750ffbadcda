"""Chat messages: what a caller may hand in, checked before a template sees it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from asyncinfer.errors import InvalidRequest

__all__ = ["check_messages", "plain"]

#: Most levels of lists and mappings inside one another.
MAX_DEPTH = 32


def check_messages(messages: object) -> list[dict[str, Any]]:
    """A copy of `messages` as plain lists and dicts: each with `role`, and `content` as one
    string. Raises `InvalidRequest` naming the place, such as `messages[2].role`."""
    if isinstance(messages, str | bytes) or not isinstance(messages, Sequence):
        raise InvalidRequest("messages", messages, "must be a list of messages")
    if not messages:
        raise InvalidRequest("messages", messages, "must hold at least one message")
    return [_message(f"messages[{index}]", message) for index, message in enumerate(messages)]


def plain(where: str, value: object, depth: int = 0) -> Any:
    """A copy of JSON-like `value`. Nothing else may reach a template: it could call it."""
    if value is None or isinstance(value, bool | int | float):
        return value
    if isinstance(value, str):
        return str(value)
    if depth >= MAX_DEPTH:
        raise InvalidRequest(where, type(value).__name__, f"at most {MAX_DEPTH} levels deep")
    if isinstance(value, Mapping):
        for key in value:
            if not isinstance(key, str):
                raise InvalidRequest(where, key, "keys must be strings")
        return {str(k): plain(f"{where}.{k}", v, depth + 1) for k, v in value.items()}
    if isinstance(value, Sequence) and not isinstance(value, bytes | bytearray | memoryview):
        return [plain(f"{where}[{i}]", item, depth + 1) for i, item in enumerate(value)]
    raise InvalidRequest(where, value, "must be a string, number, boolean, None, list or mapping")


def _message(where: str, message: object) -> dict[str, Any]:
    if not isinstance(message, Mapping):
        raise InvalidRequest(where, message, "must be a mapping with role and content")
    copy = plain(where, message)
    assert isinstance(copy, dict)
    if "role" not in copy:
        raise InvalidRequest(f"{where}.role", None, "is missing")
    if not isinstance(copy["role"], str) or not copy["role"]:
        raise InvalidRequest(f"{where}.role", copy["role"], "must be a non-empty string")
    if copy.get("content") is None:
        # An assistant that only calls tools says nothing.
        if not copy.get("tool_calls"):
            raise InvalidRequest(f"{where}.content", None, "is missing")
    else:
        copy["content"] = _content(f"{where}.content", copy["content"])
    return copy


def _content(where: str, content: object) -> str:
    if isinstance(content, str):
        return content
    if not isinstance(content, list):
        raise InvalidRequest(where, content, "must be a string or a list of text parts")
    return "".join(_part(f"{where}[{index}]", part) for index, part in enumerate(content))


def _part(where: str, part: object) -> str:
    if not isinstance(part, dict):
        raise InvalidRequest(where, part, "must be a mapping with type and text")
    if part.get("type") != "text":
        raise InvalidRequest(f"{where}.type", part.get("type"), "must be 'text'")
    if not isinstance(part.get("text"), str):
        raise InvalidRequest(f"{where}.text", part.get("text"), "must be a string")
    text: str = part["text"]
    return text
