"""Parts of grammars in Lark's syntax."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any, Final

from asyncinfer.tools.schemas import restated, with_known_formats

__all__ = ["JSON_SPACE", "Unheld", "content_rule", "escaped", "joined", "json_rule", "lazily"]

#: White space of JSON, bounded, since a model may go on with it for ever.
JSON_SPACE: Final = r"[\x20\x0A\x0D\x09]{1,8}"


class Unheld(Exception):
    """Calls cannot be held to a schema."""

    def __init__(self, place: str, why: str) -> None:
        self.place = place
        self.why = why


def escaped(text: str) -> str:
    """`text` within a regular expression."""
    return "".join(f"\\x{{{ord(char):x}}}" for char in text)


def lazily(name: str, end: str) -> str:
    """A rule for any text up to the first `end`, which is part of it."""
    return f"{name}[lazy]: /(.|\\n)*{escaped(end)}/"


def json_rule(name: str, schema: Mapping[str, Any]) -> str:
    """A rule for JSON that fits a schema."""
    return content_rule(name, with_known_formats(schema))


def content_rule(name: str, schema: Mapping[str, Any]) -> str:
    """`json_rule` for a schema whose formats grammars know."""
    guided = {**restated(schema), "x-guidance": {"whitespace_pattern": JSON_SPACE}}
    return f"{name}: %json {json.dumps(guided)}"


def joined(name: str, parts: Sequence[tuple[str, bool]], comma: str) -> list[str]:
    """Rules for parts with commas between them, of which those may be left out that are not
    required."""
    rules = []
    for at, (part, required) in enumerate(parts):
        rest = f"{name}_more_{at + 1}"
        skip = "" if required else f" | {name}_from_{at + 1}"
        rules.append(f"{name}_from_{at}: {part} {rest}{skip}")
        skip = "" if required else f" | {rest}"
        rules.append(f"{name}_more_{at}: {json.dumps(comma)} {part} {rest}{skip}")
    last = len(parts)
    return [*rules, f'{name}_from_{last}: ""', f'{name}_more_{last}: ""', f"{name}: {name}_from_0"]
