"""How a plugin is chosen: by name, by name with arguments, or as an object."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, TypeAlias, TypeVar

__all__ = ["Chosen", "chosen_name"]

T = TypeVar("T")

#: `"arc"`, `("ttl", {"default": 60.0})` or an object that implements the protocol.
Chosen: TypeAlias = str | tuple[str, Mapping[str, Any]] | T


def chosen_name(chosen: object) -> tuple[str, Mapping[str, Any]] | None:
    """The name and the arguments of a plugin that is chosen by name; None for an object.

    Raises:
        ValueError: it is a tuple or a list, but not a name with arguments.
    """
    match chosen:
        case str():
            return chosen, {}
        case tuple((str(name), Mapping() as args)) if all(isinstance(key, str) for key in args):
            return name, args
        case tuple() | list():
            raise ValueError("must be a pair (name, mapping of arguments)")
    return None
