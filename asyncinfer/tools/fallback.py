"""Tools for models whose chat template knows none: told as text, and called as JSON."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any, Final

from asyncinfer.tools.tool import Tool

__all__ = ["without_tools"]

#: Models read letters better than the numbers of those that are not ASCII's.
_JSON: Final = json.JSONEncoder(ensure_ascii=False).encode
_TELLING = """You can call these tools:
{tools}

To call a tool, answer with nothing but a JSON object such as
{{"name": "tool_name", "arguments": {{"argument": "value"}}}}
with one line for each call. Its result comes in the next message. Otherwise answer in words."""


def without_tools(
    messages: Sequence[Mapping[str, Any]], tools: Sequence[Tool], *, system: bool = True
) -> list[Mapping[str, Any]]:
    """Messages for a template that knows no tools: the first one lists the tools; calls and results
    are text. `system`: the list may be a system message. Many templates take users' and assistants'
    messages in turns only, so results in a row, and what the user says after them, are one
    message."""
    named = {}
    found: list[Mapping[str, Any]] = []
    #: Whether the last message is of results.
    results = False
    for message in messages:
        calls = message.get("tool_calls") if isinstance(message, Mapping) else None
        if isinstance(calls, list) and calls:
            for call in calls:
                if isinstance(call, Mapping) and isinstance(call.get("function"), Mapping):
                    named[_id(call.get("id"))] = call["function"].get("name")
            lines = [message.get("content") or "", *map(_written, calls)]
            text = "\n".join(line for line in lines if isinstance(line, str) and line)
            rest = {key: value for key, value in message.items() if key != "tool_calls"}
            found.append({**rest, "content": text})
        elif isinstance(message, Mapping) and message.get("role") == "tool":
            name = message.get("name") or named.get(_id(message.get("tool_call_id"))) or "the tool"
            content = message.get("content")
            if isinstance(content, str):
                _say(found, f"Result of {name}:\n{content}", results)
                results = True
                continue
            found.append({**message, "role": "user"})
        elif results and _is_said(message):
            _say(found, message["content"], results)
        else:
            found.append(message)
        results = False
    if not tools:
        return found
    listed = "\n".join(_JSON(tool.definition["function"]) for tool in tools)
    telling = _TELLING.format(tools=listed)
    first = found[0] if found else {}
    if first.get("role") in ("system", "developer") and isinstance(first.get("content"), str):
        return [{**first, "content": f"{first['content']}\n\n{telling}"}, *found[1:]]
    if system or not _is_said(first):
        return [{"role": "system" if system else "user", "content": telling}, *found]
    return [{**first, "content": f"{telling}\n\n{first['content']}"}, *found[1:]]


def _is_said(message: Any) -> bool:
    """Whether it is text of the user's."""
    if not isinstance(message, Mapping):
        return False
    return message.get("role") == "user" and isinstance(message.get("content"), str)


def _say(found: list[Mapping[str, Any]], text: str, more: bool) -> None:
    """Add a message of the user's, or with `more` to the last one."""
    if more:
        text = f"{found.pop()['content']}\n\n{text}"
    found.append({"role": "user", "content": text})


def _id(value: Any) -> object:
    """A call's id, unchecked: a list is the id of no call."""
    return value if isinstance(value, str | None) else object()


def _written(call: Any) -> str:
    function = call.get("function") if isinstance(call, Mapping) else None
    if not isinstance(function, Mapping):
        return ""
    arguments = function.get("arguments")
    text = arguments if isinstance(arguments, str) else _JSON(arguments)
    return f'{{"name": {_JSON(function.get("name"))}, "arguments": {text}}}'
