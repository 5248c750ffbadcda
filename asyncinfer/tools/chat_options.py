"""`ChatOptions`: the options of a request that concern its chat."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from asyncinfer.bounds import MAX_TEMPLATE_OPTION_CHARS
from asyncinfer.checks import check_boolean
from asyncinfer.errors import InvalidRequest, Size
from asyncinfer.suggestions import suggestion
from asyncinfer.tools.tool import Tool, check_tools

__all__ = ["ChatOptions"]

CHOICES = ("auto", "none", "required")


@dataclass(frozen=True, slots=True, kw_only=True)
class ChatOptions:
    """Raises `InvalidRequest`."""

    #: What the model may call.
    tools: tuple[Tool, ...] = ()
    #: "auto": calls or text. "none": text. "required": a call. Or the name of the tool to call.
    tool_choice: str = "auto"
    #: Whether one answer may call several times.
    parallel_tool_calls: bool = True
    #: Variables of the chat template, such as `enable_thinking`.
    template_options: Mapping[str, Any] = field(default_factory=dict)
    #: Go on with the last message, which is the assistant's, instead of answering it.
    continue_final_message: bool = False

    @classmethod
    def of(
        cls,
        tools: object,
        tool_choice: object,
        parallel_tool_calls: object,
        template_options: object,
        continue_final_message: object,
    ) -> ChatOptions | None:
        """The checked options; None where a request has none of them. Raises `InvalidRequest`."""
        named = (tools, tool_choice, template_options)
        plain = parallel_tool_calls is True and continue_final_message is False
        if plain and all(value is None for value in named):
            return None
        found = () if tools is None else check_tools(tools)
        if not found and tool_choice not in (None, "auto", "none"):
            raise InvalidRequest("tool_choice", tool_choice, "needs tools=")
        return cls(
            tools=found,
            tool_choice=_choice(tool_choice, found),
            parallel_tool_calls=check_boolean("parallel_tool_calls", parallel_tool_calls),
            template_options=_options(template_options),
            continue_final_message=check_boolean("continue_final_message", continue_final_message),
        )

    @property
    def callable_tools(self) -> tuple[Tool, ...]:
        """The tools that an answer may call."""
        if self.tool_choice == "none":
            return ()
        if self.tool_choice in CHOICES:
            return self.tools
        return tuple(tool for tool in self.tools if tool.name == self.tool_choice)

    @property
    def must_call(self) -> bool:
        """Whether an answer has to call a tool."""
        return bool(self.tools) and self.tool_choice not in ("auto", "none")

    @property
    def held_bytes(self) -> int:
        """About the bytes that they take."""
        chars = len(str(dict(self.template_options)))
        return chars + sum(len(str(tool.schema)) + len(tool.description) for tool in self.tools)


def _choice(value: object, tools: tuple[Tool, ...]) -> str:
    if value is None:
        return "auto"
    names = [tool.name for tool in tools]
    found, given = (*CHOICES, *names), value
    modes = ", ".join(CHOICES)
    bound = f"must be one of {modes} or the name of a tool"
    if isinstance(value, Mapping):
        # OpenAI's and Anthropic's clients name a tool by an object.
        inner = value.get("function", value)
        value = inner.get("name") if isinstance(inner, Mapping) else None
        found = tuple(name for name in names if name not in CHOICES)
        bound = f"must be the name of a tool, and none of {modes}"
        if value is None:
            # Such as OpenAI's "allowed_tools".
            raise InvalidRequest("tool_choice", given, "an object must have the name of a tool")
    if not isinstance(value, str) or value not in found:
        near = suggestion(value, names) if isinstance(value, str) else ""
        raise InvalidRequest("tool_choice", value, f"{bound}{near}")
    return value


def _options(value: object) -> Mapping[str, Any]:
    if value is None:
        return {}
    if not isinstance(value, Mapping) or not all(isinstance(name, str) for name in value):
        raise InvalidRequest("template_options", value, "must map names to values")
    chars = 0
    try:
        # In pieces, to stop as soon as the text is too long.
        for piece in json.JSONEncoder(default=str).iterencode(dict(value)):
            chars += len(piece)
            if chars > MAX_TEMPLATE_OPTION_CHARS:
                break
    except (TypeError, ValueError, RecursionError) as error:
        raise InvalidRequest("template_options", value, f"is no plain data: {error}") from None
    if chars > MAX_TEMPLATE_OPTION_CHARS:
        bound = f"at most {MAX_TEMPLATE_OPTION_CHARS}"
        raise InvalidRequest("template_options", Size(f"{chars} characters or more"), bound)
    return dict(value)
