"""Where in a JSON Schema an error is."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping
from typing import Any, Final

from asyncinfer.errors import InvalidRequest
from asyncinfer.tools.schemas import is_exact

__all__ = ["check_values", "parts", "place_of_error", "pointer"]

#: Keywords whose value is a schema, a list of schemas, or schemas by name.
_ONE: Final = ("additionalProperties", "items", "additionalItems", "unevaluatedProperties", "not")
_LISTED: Final = ("anyOf", "oneOf", "allOf", "prefixItems", "items")
_NAMED: Final = ("properties", "patternProperties")
#: Keywords whose schemas other parts refer to.
_SHARED: Final = ("$defs", "definitions")
_SECONDS: Final = 0.3


def place_of_error(schema: Any, error_of: Callable[[Any], str]) -> str:
    """The JSON pointer of the innermost schema that has the error of the whole one; empty for the
    whole. A search that takes too long ends with the place found so far.

    Args:
        error_of: compiles a schema and gives what is wrong with it; empty where nothing is.
    """
    until = time.monotonic() + _SECONDS
    shared = {name: schema[name] for name in _SHARED if name in schema}
    error, place, inner = error_of(schema), "", schema
    seen = {""}
    while True:
        for at, part in parts(schema, place, inner):
            if time.monotonic() > until:
                return place
            if at not in seen and error_of({**shared, **part}) == error:
                seen.add(at)
                place, inner = at, part
                break
        else:
            return place


def check_values(field: str, root: Mapping[str, Any]) -> None:
    """Raises `InvalidRequest` where a `const` or `enum` has a number that would be written
    otherwise."""
    seen: set[str] = set()
    waiting: list[tuple[str, Mapping[str, Any]]] = [("", root)]
    while waiting:
        place, schema = waiting.pop()
        if place not in seen:
            seen.add(place)
            waiting += parts(root, place, schema)
            for key in ("const", "enum"):
                if not is_exact(schema.get(key)):
                    bound = "integers beyond 2**53 must be floats, since no others can be written"
                    raise InvalidRequest(field + pointer(place, key), schema[key], bound)


def pointer(place: str, *names: str) -> str:
    """The JSON pointer (RFC 6901) of what has these names, one within the other, at `place`."""
    return "/".join([place, *(name.replace("~", "~0").replace("/", "~1") for name in names)])


def parts(root: Any, place: str, schema: Any) -> Iterator[tuple[str, dict[str, Any]]]:
    """The schemas directly in this one, each with its pointer, and the one it refers to."""
    found = [(pointer(place, key), schema.get(key)) for key in _ONE]
    for key in _LISTED:
        if isinstance(listed := schema.get(key), list):
            found += [(pointer(place, key, str(at)), part) for at, part in enumerate(listed)]
    for key in _NAMED:
        if isinstance(named := schema.get(key), dict):
            found += [(pointer(place, key, name), part) for name, part in named.items()]
    target = schema.get("$ref")
    if isinstance(target, str) and (target == "#" or target.startswith("#/")):
        found.append((target[1:], _at(root, target.split("/")[1:])))
    return ((at, part) for at, part in found if isinstance(part, dict))


def _at(value: Any, names: list[str]) -> Any:
    """What lies at a JSON pointer; None where nothing does."""
    for name in names:
        key = name.replace("~1", "/").replace("~0", "~")
        value = value.get(key) if isinstance(value, dict) else None
    return value
