"""The family that a checkpoint describes itself, in `response_template` of `tokenizer_config.json`.

The description is that of transformers (from 5.13 on): fields of a message, the delimiters of each
as texts or regular expressions, and how its content is read. It is translated into the syntaxes
there are here, each of which has a parser and a grammar. No expression of a checkpoint is run: one
is read as texts, white space and named groups, and refused where it says more.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any, Final, NamedTuple

from asyncinfer.tools.family import CallSyntax, Span, ToolFamily
from asyncinfer.tools.gemma_calls import GemmaCalls
from asyncinfer.tools.json_calls import JsonCalls
from asyncinfer.tools.named_calls import TaggedCalls
from asyncinfer.tools.xml_calls import XmlCalls

__all__ = ["Undescribed", "described"]

#: Characters of one text or expression.
_MOST_CHARS: Final = 512
_REASONING: Final = ("reasoning_content", "thinking", "reasoning")
_FIELDS: Final = frozenset([*_REASONING, "content", "tool_calls"])
#: Arguments as one value under a key of the call, by what a transformation says of them.
_KEYS: Final = {
    "{content}": "arguments",
    "{content.arguments}": "arguments",
    "{content.parameters}": "parameters",
    "{arguments}": "arguments",
    "{parameters}": "parameters",
}
_PIECE: Final = re.compile(
    r"(?P<space>\\[sn][*+]\??)"
    r"|\(\?P<(?P<group>\w+)>(?:[^()\\]|\\.)+\)"
    r"|\\(?P<line>n)"
    r"|\\(?P<escaped>[^\w\s])"
    r"|(?P<text>[^\\.^$*+?{}\[\]|()])"
)


class Undescribed(Exception):
    """A description says what no syntax here can. The message names the place."""


class _Piece(NamedTuple):
    """A part of a delimiter. Exactly one of the two is set; neither is for white space."""

    text: str = ""
    group: str = ""


def described(template: Mapping[str, Any], name: str = "response_template") -> ToolFamily:
    """A family of this name. Its `calls` and `reasoning` are None where the description has none.

    Raises `Undescribed`.
    """
    if template.get("version", 1) != 1:
        raise Undescribed(f"version={template['version']!r}")
    fields = template.get("fields")
    if not isinstance(fields, Mapping) or not all(isinstance(v, Mapping) for v in fields.values()):
        raise Undescribed("fields: must be an object of objects")
    if unknown := fields.keys() - _FIELDS:
        raise Undescribed(f"fields.{min(unknown)}: is no part of an answer here")
    content = fields.get("content", {})
    if "open" in content or "open_pattern" in content:
        raise Undescribed("fields.content: begins with a delimiter")
    thought = next((key for key in _REASONING if key in fields), None)
    span = None
    if thought is not None:
        ends = [_one(_Field(thought, fields[thought]).pieces(end)) for end in ("open", "close")]
        if not all(ends):
            raise Undescribed(f"fields.{thought}: must be between two texts")
        span = Span(*ends)
    calls = _calls(_Field("tool_calls", fields["tool_calls"])) if "tool_calls" in fields else None
    return ToolFamily(name, calls, span)


class _Field:
    """One field of a description."""

    def __init__(self, name: str, spec: Mapping[str, Any]) -> None:
        self.name = name
        self.spec = spec
        arguments = spec.get("content_args")
        self.arguments: Mapping[str, Any] = arguments if isinstance(arguments, Mapping) else {}

    def pieces(self, end: str) -> list[_Piece]:
        """Its delimiter "open" or "close", without white space around it; empty without one."""
        text = self.spec.get(end)
        if isinstance(text, list) and len(text) == 1:
            (text,) = text
        if isinstance(text, str) and text:
            return [_Piece(text)]
        if text is not None:
            raise self.unread(end, "must be one text")
        pattern = self.spec.get(f"{end}_pattern")
        return [] if pattern is None else self.read(f"{end}_pattern", pattern)

    def read(self, key: str, pattern: object) -> list[_Piece]:
        """The pieces of a regular expression."""
        if not isinstance(pattern, str) or not 0 < len(pattern) <= _MOST_CHARS:
            raise self.unread(key, f"must have 1 to {_MOST_CHARS} characters")
        pieces: list[_Piece] = []
        at = 0
        while at < len(pattern):
            found = _PIECE.match(pattern, at)
            if found is None:
                raise self.unread(key, f"{pattern[at:]!r} is not read")
            at = found.end()
            text = "\n" if found["line"] else found["escaped"] or found["text"] or ""
            if text and pieces and pieces[-1].text:
                pieces[-1] = _Piece(pieces[-1].text + text)
            else:
                pieces.append(_Piece(text, found["group"] or ""))
        while pieces and pieces[0] == _Piece():
            del pieces[0]
        while pieces and pieces[-1] == _Piece():
            del pieces[-1]
        return pieces

    def unread(self, key: str, why: str) -> Undescribed:
        return Undescribed(f"fields.{self.name}.{key}: {why}")


def _one(pieces: list[_Piece]) -> str:
    """The text that a delimiter is; empty where it is none, or more."""
    return pieces[0].text if len(pieces) == 1 else ""


def _calls(field: _Field) -> CallSyntax:
    transform = field.spec.get("transform", "{content}")
    function = transform.get("function") if isinstance(transform, Mapping) else transform
    match field.spec.get("content"), function:
        case "json", {"name": "{name}", "arguments": "{content}"}:
            return _named(field)
        case "json", str(whole) if whole in _KEYS:
            return _objects(field, _KEYS[whole])
        case "json", {"name": "{name}" | "{content.name}", "arguments": str(held)} if held in _KEYS:
            return _objects(field, _KEYS[held])
        case "xml-inline", {"name": "{name}", "arguments": "{content}"}:
            return _tags(field)
    raise field.unread("transform", "must give a name and arguments of JSON or inline XML")


def _objects(field: _Field, key: str) -> CallSyntax:
    """`<open>{"name": ..., "arguments": {...}}<close>`, or a list of these."""
    opening, close = _one(field.pieces("open")).strip(), field.pieces("close")
    if not opening or field.arguments or (close and not _one(close)):
        raise field.unread("open", "must be one text, and close one or none, around JSON")
    listed = bool(field.spec.get("transform_each"))
    if not listed and not field.spec.get("repeats"):
        raise field.unread("repeats", "must be true for single calls")
    return JsonCalls((opening,), _one(close).strip(), key, listed)


def _named(field: _Field) -> CallSyntax:
    """`<open>name<between>{...}<close>`."""
    close = _one(field.pieces("close")).strip()
    match _texts(field.pieces("open")), field.arguments:
        case [opening, "{name}"], {} if close and not field.arguments:
            return TaggedCalls(opening, "", close)
        case [opening, "{name}", between], {} if close and not field.arguments:
            return TaggedCalls(opening, between, close)
        case [opening, "{name}"], {"string_delims": [[str(quote), str(other)]]} if (
            close and quote == other and opening.endswith("call:") and opening != "call:"
        ):
            return GemmaCalls(opening.removesuffix("call:"), close, quote)
    raise field.unread("open_pattern", "must be a text, a name and a text before JSON")


def _tags(field: _Field) -> CallSyntax:
    """`<open><function=name><parameter=key>value</parameter></function><close>` and the like."""
    tag = field.read("content_args.tag_pattern", field.arguments.get("tag_pattern"))
    value = _Piece(group="value")
    # White space around a value belongs to the tags.
    line = _Piece() in tag[tag.index(value) + 1 :] if value in tag else False
    opens, closes = _texts(field.pieces("open")), _texts(field.pieces("close"))
    tags = _texts(tag)
    match opens:
        case [opening, "{name}"]:
            name_open = name_close = ""
        case [opening, name_open, "{name}", name_close]:
            pass
        case _:
            raise field.unread("open_pattern", "must be a text and a name, alone or between texts")
    match tags:
        case [key_open, "{key}", key_close, "{value}", value_close]:
            value_open = ""
        case [key_open, "{key}", key_close, value_open, "{value}", value_close]:
            pass
        case _:
            raise field.unread("content_args.tag_pattern", "must be a key, a value and texts")
    if not 1 <= len(closes) <= 2:
        raise field.unread("close", "must be one text or two")
    return XmlCalls(
        open=opening,
        close=closes[-1],
        name_open=name_open,
        name_close=name_close,
        key_open=key_open,
        key_close=key_close,
        value_open=value_open,
        value_close=value_close,
        end=closes[0] if len(closes) == 2 else "",
        line=line,
    )


def _texts(pieces: list[_Piece]) -> list[str]:
    """Texts, and groups as `{name}`, without the white space between them."""
    found = (f"{{{piece.group}}}" if piece.group else piece.text.strip() for piece in pieces)
    return [text for text in found if text]
