"""A plugin on the command line: `NAME` or `NAME:ARGUMENT=VALUE,...`."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any, Final

import click

from asyncinfer.errors import PluginError
from asyncinfer.plugins import Registry

__all__ = ["parse_plugin", "plugin_choice"]


def plugin_choice(
    registry: Registry[Any], *, make: bool
) -> Callable[[str], tuple[str, dict[str, Any]]]:
    """The type of an option: converts to `(name, arguments)`, once the plugin is known to take
    them.

    Args:
        registry: of its kind.
        make: also make one, which checks the arguments' values; for kinds that do nothing when
            they are made.
    """

    def convert(text: str) -> tuple[str, dict[str, Any]]:
        try:
            name, args = parse_plugin(text)
            if make:
                registry.resolve((name, args))
            else:
                registry.check(name, args)
        except (PluginError, ValueError) as error:
            raise click.BadParameter(f"{text!r}: {error}") from error
        return name, args

    return convert


def parse_plugin(text: str) -> tuple[str, dict[str, Any]]:
    """`NAME:ARGUMENT=VALUE,...` as a name and its arguments. A value is what JSON says it is, and
    text where it is no JSON. Raises `ValueError`."""
    name, colon, rest = text.partition(":")
    if not name:
        raise ValueError("must begin with a plugin's name")
    args: dict[str, Any] = {}
    while colon:
        key, equals, rest = rest.partition("=")
        if not equals or not key or "," in key:
            raise ValueError("after the name must come :ARGUMENT=VALUE, with commas between")
        if key in args:
            raise ValueError(f"argument {key!r} is given twice")
        args[key], colon, rest = _value(rest)
    return name, args


def _no_number(text: str) -> float:
    raise ValueError(f"{text} is no JSON")


_DECODER: Final = json.JSONDecoder(parse_constant=_no_number)


def _value(text: str) -> tuple[Any, str, str]:
    """The first value, the comma after it if there is one, and the rest."""
    try:
        value, end = _DECODER.raw_decode(text)
    except (ValueError, RecursionError):
        return text.partition(",")
    if text[end : end + 1] in ("", ","):
        return value, text[end : end + 1], text[end + 1 :]
    return text.partition(",")
