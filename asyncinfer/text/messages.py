"""Chat messages, checked and copied before a template sees them."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final

from asyncinfer.checks import check_string
from asyncinfer.errors import InvalidRequest
from asyncinfer.text.shield import check_text

__all__ = ["check_messages", "joined", "plain", "unread"]

#: Types of message parts that no model here reads, and what they hold.
_UNREAD: Final = {
    **dict.fromkeys(("image_url", "input_image", "image"), "images"),
    **dict.fromkeys(("file", "input_file", "document"), "files"),
    **dict.fromkeys(("input_audio", "audio"), "audio"),
    **dict.fromkeys(("video_url", "video"), "videos"),
}

#: Most levels of lists and mappings inside one another.
MAX_DEPTH: Final = 32
#: Names of a message's reasoning, of which templates read one or another; the first found counts.
_REASONING: Final = ("reasoning_content", "thinking", "reasoning")

Text = Callable[[str], str]


class _Misfit(Exception):
    """A value is refused. Each level that the exception leaves puts its own part before `where`."""

    def __init__(self, value: object, bound: str, where: str = "") -> None:
        self.value = value
        self.bound = bound
        self.where = where


def check_messages(
    messages: object, text_of: Callable[[str], Text] = lambda role: str
) -> list[dict[str, Any]]:
    """A copy of `messages` as plain lists and dicts: each with `role`, and `content` as one
    string. `text_of(role)` makes the texts of a message. Raises `InvalidRequest` naming the place,
    such as `messages[2].role`.

    As in transformers, a field that is None is left out, and reasoning is found under all of its
    names.
    """
    if isinstance(messages, str | bytes) or not isinstance(messages, Sequence):
        raise InvalidRequest("messages", messages, "must be a list of messages")
    if not messages:
        raise InvalidRequest("messages", messages, "must hold at least one message")
    return [_message(f"messages[{i}]", message, text_of) for i, message in enumerate(messages)]


def plain(where: str, value: object, text: Text = str) -> Any:
    """A copy of JSON-like `value`, with `text` applied to each string and name. No other object may
    reach a template, which could call it."""
    try:
        return _copy(value, text, 0)
    except _Misfit as misfit:
        raise InvalidRequest(where + misfit.where, misfit.value, misfit.bound) from None


def _copy(value: object, text: Text, depth: int) -> Any:
    if isinstance(value, str):
        return text(_valid(value))
    if value is None or isinstance(value, bool):
        return value
    if isinstance(value, int):
        # A plain int, since a subclass could override methods.
        return int.__int__(value)
    if isinstance(value, float):
        return float.__float__(value)
    if depth >= MAX_DEPTH:
        raise _Misfit(type(value).__name__, f"at most {MAX_DEPTH} levels deep")
    place: object = None
    items: list[Any] = []
    try:
        if isinstance(value, Mapping):
            copy = {}
            for place, item in value.items():
                if not isinstance(place, str):
                    break
                copy[text(_valid(place))] = _copy(item, text, depth + 1)
            else:
                return copy
        elif isinstance(value, Sequence) and not isinstance(value, bytes | bytearray | memoryview):
            # One by one, so that the number of items copied is the index of a refused one.
            items.extend(_copy(item, text, depth + 1) for item in value)
            return items
    except _Misfit as misfit:
        misfit.where = (f"[{len(items)}]" if place is None else f".{place}") + misfit.where
        raise
    if place is not None:
        raise _Misfit(place, "keys must be strings")
    raise _Misfit(value, "must be a string, number, boolean, None, list or mapping")


def _valid(text: str) -> str:
    if not text.isascii():
        try:
            check_text("", text)
        except InvalidRequest as error:
            raise _Misfit(error.value, error.bound) from None
    return str.__str__(text)


def _message(where: str, message: object, text_of: Callable[[str], Text]) -> dict[str, Any]:
    if not isinstance(message, Mapping):
        raise InvalidRequest(where, message, "must be a mapping with role and content")
    role = message.get("role")
    if role is None:
        raise InvalidRequest(f"{where}.role", None, "is missing")
    if not isinstance(role, str) or not role:
        raise InvalidRequest(f"{where}.role", role, "must be a non-empty string")
    text = text_of(role)
    copy = plain(where, {name: value for name, value in message.items() if value is not None}, text)
    assert isinstance(copy, dict)
    if "content" in copy:
        copy["content"] = _content(f"{where}.content", copy["content"], text)
    elif not copy.get("tool_calls"):
        # A message that only calls tools needs no content.
        raise InvalidRequest(f"{where}.content", None, "is missing")
    thought = next((copy[name] for name in _REASONING if name in copy), None)
    return copy if thought is None else {"thinking": thought, **copy, _REASONING[0]: thought}


def _content(where: str, content: object, text: Text) -> str:
    if isinstance(content, str):
        return content
    if not isinstance(content, list):
        raise InvalidRequest(where, content, "must be a string or a list of text parts")
    parts = [_part(f"{where}[{index}]", part) for index, part in enumerate(content)]
    return text("".join(parts))


def _part(where: str, part: object) -> str:
    if not isinstance(part, dict):
        raise InvalidRequest(where, part, "must be a mapping with type and text")
    if part.get("type") != "text":
        raise unread(f"{where}.type", part.get("type"))
    return check_string(f"{where}.text", part.get("text"))


def joined(message: Any) -> Any:
    """An unchecked message whose content is parts of text, with one text in their place; any other
    message as it is."""
    content = message.get("content") if isinstance(message, Mapping) else None
    parts = content if isinstance(content, list) else ()
    texts = [
        part["text"]
        for part in parts
        if isinstance(part, Mapping)
        and part.get("type") == "text"
        and isinstance(part.get("text"), str)
    ]
    if not texts or len(texts) < len(parts):
        return message
    return {**message, "content": "".join(texts)}


def unread(where: str, kind: object) -> InvalidRequest:
    """The error of a message's part that is no text."""
    what = _UNREAD.get(kind, "it") if isinstance(kind, str) else "it"
    return InvalidRequest(where, kind, f"must be 'text': {what} cannot be read by this model")
