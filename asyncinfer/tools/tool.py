"""`Tool`: what a model may call, from a function, a pydantic model or a JSON Schema."""

from __future__ import annotations

import inspect
import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

from asyncinfer.bounds import MAX_TOOL_CHARS, MAX_TOOL_NAME, MAX_TOOLS
from asyncinfer.checks import check_string
from asyncinfer.errors import InvalidRequest, Size
from asyncinfer.structured_output import is_typed, json_object_text, schema_of

__all__ = ["Tool", "check_tools"]

_NAME: Final = re.compile(rf"[a-zA-Z0-9_.\-]{{1,{MAX_TOOL_NAME}}}")
#: Keys of a tool's description that hold the schema of its arguments: OpenAI's, MCP's, Anthropic's.
_SCHEMAS: Final = ("parameters", "inputSchema", "input_schema")
_ARGUMENT: Final = re.compile(r"(\w+)(?: \([^)]*\))?: (.+)")


@dataclass(frozen=True)
class Tool:
    """A tool as a request names it."""

    name: str
    description: str
    #: The JSON Schema of its arguments, an object.
    schema: Mapping[str, Any]
    #: The pydantic model whose instances `ToolCall.parsed` are; None for plain data.
    model: Any = field(default=None, compare=False)

    @property
    def definition(self) -> dict[str, Any]:
        """The tool in the form that chat templates take."""
        function = {"name": self.name, "description": self.description, "parameters": self.schema}
        return {"type": "function", "function": function}


def check_tools(value: object) -> tuple[Tool, ...]:
    """The tools of a request. Raises `InvalidRequest`, naming the one that is wrong."""
    if isinstance(value, str | bytes | Mapping) or not isinstance(value, Sequence):
        raise InvalidRequest("tools", value, "must be a list of functions, models or JSON schemas")
    if len(value) > MAX_TOOLS:
        raise InvalidRequest("tools", Size(f"{len(value)} tools"), f"at most {MAX_TOOLS}")
    tools = [_tool(f"tools[{index}]", entry) for index, entry in enumerate(value)]
    chars = 0
    seen: set[str] = set()
    for index, tool in enumerate(tools):
        if tool.name in seen:
            raise InvalidRequest(f"tools[{index}].name", tool.name, "is the name of another tool")
        seen.add(tool.name)
        chars += len(json.dumps(tool.schema)) + len(tool.description)
    if chars > MAX_TOOL_CHARS:
        bound = f"at most {MAX_TOOL_CHARS} characters together"
        raise InvalidRequest("tools", Size(f"{chars} characters"), bound)
    return tuple(tools)


def _tool(place: str, value: Any) -> Tool:
    if isinstance(value, Tool):
        return value
    if isinstance(value, Mapping):
        return _described(place, value)
    if isinstance(value, type) and is_typed(value):
        schema = _object(place, json.loads(schema_of(value)))
        description = schema.pop("description", "")
        return Tool(_name(place, value.__name__), description, schema, value)
    if callable(value):
        return _function(place, value)
    raise InvalidRequest(place, value, "must be a function, a pydantic model or a JSON Schema")


def _described(place: str, value: Mapping[str, Any]) -> Tool:
    """`{"type": "function", "function": {...}}`, or what is in it by itself."""
    kind = value.get("type", "function")
    if kind != "function":
        raise InvalidRequest(f"{place}.type", kind, "must be 'function'")
    inner = value.get("function", value)
    if not isinstance(inner, Mapping):
        raise InvalidRequest(f"{place}.function", inner, "must be a mapping")
    description = check_string(f"{place}.description", inner.get("description") or "")
    key = next((key for key in _SCHEMAS if inner.get(key) is not None), None)
    schema: Any = {"type": "object", "properties": {}} if key is None else inner[key]
    schema = _object(f"{place}.{key or _SCHEMAS[0]}", schema)
    return Tool(_name(f"{place}.name", inner.get("name")), description, schema)


def _function(place: str, function: Callable[..., Any]) -> Tool:
    name = _name(place, getattr(function, "__name__", None))
    try:
        from pydantic import ConfigDict, Field, TypeAdapter, create_model
    except ModuleNotFoundError as error:
        raise ModuleNotFoundError(
            'functions as tools need pydantic: pip install "asyncinfer[pydantic]"', name=error.name
        ) from None
    text, told = _docstring(function)
    fields: dict[str, Any] = {}
    try:
        for each in inspect.signature(function, eval_str=True).parameters.values():
            if each.kind in (each.VAR_POSITIONAL, each.VAR_KEYWORD, each.POSITIONAL_ONLY):
                raise InvalidRequest(place, each.name, "must be an argument that has a name")
            kind = Any if each.annotation is each.empty else each.annotation
            default = ... if each.default is each.empty else each.default
            about = told.get(each.name)
            fields[each.name] = (kind, Field(default, description=about) if about else default)
        model = create_model(name, __config__=ConfigDict(extra="forbid"), **fields)
        schema = TypeAdapter(model).json_schema()
    except InvalidRequest:
        raise
    except Exception as error:
        raise InvalidRequest(place, name, f"has no JSON Schema: {error}") from error
    return Tool(name, text, _object(place, schema))


def _docstring(function: Callable[..., Any]) -> tuple[str, dict[str, str]]:
    """What a docstring in Google's style says of a function, and of its arguments."""
    text = inspect.getdoc(function) or ""
    about, _, rest = text.partition("\nArgs:\n")
    told: dict[str, str] = {}
    name, known = "", inspect.signature(function).parameters
    for line in rest.splitlines():
        if line and not line.startswith(" "):
            break
        found = _ARGUMENT.fullmatch(line.strip())
        # A line that goes on may look like another argument.
        if found is not None and found[1] in known and found[1] not in told:
            name = found[1]
            told[name] = found[2]
        elif name and line.strip():
            told[name] += f" {line.strip()}"
    return about.partition("\nReturns:\n")[0].strip(), told


def _name(place: str, name: object) -> str:
    if not isinstance(name, str) or not _NAME.fullmatch(name):
        bound = f"must be 1 to {MAX_TOOL_NAME} letters, digits, '_', '-' or '.'"
        raise InvalidRequest(place, name, bound)
    return name


def _object(place: str, schema: Any) -> dict[str, Any]:
    """A copy of the schema of a tool's arguments."""
    made: dict[str, Any] = json.loads(json_object_text(place, schema))
    if made.setdefault("type", "object") != "object":
        raise InvalidRequest(f"{place}/type", made["type"], "must be 'object'")
    if not isinstance(made.get("properties", {}), dict):
        raise InvalidRequest(f"{place}/properties", made["properties"], "must be an object")
    if "x-guidance" in made:
        raise InvalidRequest(f"{place}/x-guidance", Size("an object"), "is not an option")
    made.pop("title", None)
    return made
