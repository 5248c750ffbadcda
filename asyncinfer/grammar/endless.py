"""Whether what fits a JSON Schema ever ends: no text fits a schema that needs itself."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Mapping, Set
from typing import Any, Final

from asyncinfer.errors import InvalidRequest
from asyncinfer.grammar.places import parts, pointer

__all__ = ["check_ends"]

#: Passes over all schemas. What takes more, by references against the order of a pass, is let by.
_PASSES: Final = 16


def check_ends(field: str, root: Mapping[str, Any]) -> None:
    """Raises `InvalidRequest` where the schema holds, or refers to, one that no finite text fits:
    an answer that comes there cannot go on, or never ends."""
    found: dict[str, Mapping[str, Any]] = {}
    #: Groups of places by place: a schema ends where one of each of its groups does.
    needs: dict[str, list[list[str]]] = {}
    waiting = deque[tuple[str, Mapping[str, Any]]]([("", root)])
    while waiting:
        place, schema = waiting.popleft()
        if place not in found:
            inner = dict(parts(root, place, schema))
            found[place] = schema
            # A place without a schema, such as one that is true, ends.
            needs[place] = [group for group in _needs(place, schema) if inner.keys() >= {*group}]
            inner.pop(pointer(place, "not"), None)
            waiting += inner.items()
    ends: set[str] = set()
    for _ in range(_PASSES):
        before = len(ends)
        # What a schema needs mostly comes after it.
        for place in reversed(needs):
            if all(not ends.isdisjoint(group) for group in needs[place]):
                ends.add(place)
        if len(ends) == before:
            break
    else:
        return
    for place in needs:
        if place not in ends:
            at = _inmost(place, needs, ends)
            raise InvalidRequest(f"{field}{at}", found[at], "needs itself, so that no text fits it")


def _needs(place: str, schema: Mapping[str, Any]) -> Iterator[list[str]]:
    if isinstance(target := schema.get("$ref"), str):
        yield [target[1:]]
    for key in ("anyOf", "oneOf"):
        if isinstance(listed := schema.get(key), list) and listed:
            yield [pointer(place, key, str(at)) for at in range(len(listed))]
    if isinstance(listed := schema.get("allOf"), list):
        yield from ([pointer(place, "allOf", str(at))] for at in range(len(listed)))
    match schema:
        case {"type": "object" | ["object"], "required": [*names]}:
            yield from ([pointer(place, "properties", str(name))] for name in names)
        case {"type": "array" | ["array"], "minItems": int(least) | float(least)} if least > 0:
            first = schema.get("prefixItems")
            count = int(min(least, len(first))) if isinstance(first, list) else 0
            yield from ([pointer(place, "prefixItems", str(at))] for at in range(count))
            if least > count:
                yield [pointer(place, "items")]


def _inmost(place: str, needs: Mapping[str, list[list[str]]], ends: Set[str]) -> str:
    """The last schema in a row of those that do not end, each needed by the one before."""
    seen: set[str] = set()
    while place not in seen:
        seen.add(place)
        unmet = (at for group in needs[place] if ends.isdisjoint(group) for at in group)
        place = next((at for at in unmet if at not in seen), place)
    return place
