"""Whether arguments fit a factory, without calling it."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

__all__ = ["Misfit", "find_misfit"]


class Misfit(NamedTuple):
    """Why arguments do not fit."""

    #: The argument that the factory does not take; None if one is missing.
    name: str | None
    #: What is wrong, such as "takes tau, eta".
    why: str


def find_misfit(factory: Callable[..., Any], args: Mapping[str, Any]) -> Misfit | None:
    """The first of `args` that `factory` does not take, else the first argument that is missing."""
    try:
        parameters = inspect.signature(factory).parameters.values()
    # A factory written in C, or whose signature raises: the call itself will tell.
    except Exception:
        return None
    named = {
        each.name: each
        for each in parameters
        if each.kind in (each.POSITIONAL_OR_KEYWORD, each.KEYWORD_ONLY)
    }
    if not any(each.kind is each.VAR_KEYWORD for each in parameters):
        takes = f"takes {', '.join(named)}" if named else "takes no arguments"
        for name in args:
            if name not in named:
                return Misfit(name, takes)
    for each in named.values():
        if each.default is each.empty and each.name not in args:
            return Misfit(None, f"needs {each.name}")
    return None
