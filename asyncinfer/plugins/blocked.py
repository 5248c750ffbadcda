"""Names of plugins that may not be used, from `block` and from the environment.

`ASYNCINFER_BLOCK_PLUGINS` lists them as `group:name`, with commas between::

    ASYNCINFER_BLOCK_PLUGINS="asyncinfer.samplers:dry,asyncinfer.observers:*"

The name `*` stands for every plugin of the group that comes from an installed distribution.
"""

from __future__ import annotations

import os
from collections.abc import Collection
from functools import lru_cache
from typing import Final

from asyncinfer.errors import PluginError

__all__ = ["ALL", "VARIABLE", "Blocked"]

VARIABLE: Final = "ASYNCINFER_BLOCK_PLUGINS"
#: Every plugin of a group that comes from an installed distribution.
ALL: Final = "*"

#: All groups, to find misspelt ones in the variable.
_groups: Final[set[str]] = set()


class Blocked:
    """The blocked names of one group."""

    def __init__(self, group: str) -> None:
        _groups.add(group)
        self._group = group
        self._names: set[str] = set()

    def add(self, name: str) -> None:
        self._names.add(name)

    def discard(self, name: str) -> None:
        self._names.discard(name)

    def reason(self, name: str, *, installed: bool) -> str | None:
        """What blocks a name; None if nothing does. Raises `PluginError` if the variable is
        malformed, since ignoring a part of it could let a plugin in."""
        text = os.environ.get(VARIABLE)
        listed = _read(text) if text else ()
        for each in (name, ALL) if installed else (name,):
            if each in self._names:
                return "plugins.block()"
            if (self._group, each) in listed:
                return VARIABLE
        return None


@lru_cache(maxsize=8)
def _read(text: str) -> Collection[tuple[str, str]]:
    found = set()
    for entry in text.split(","):
        group, colon, name = (part.strip() for part in entry.partition(":"))
        if not entry.strip():
            continue
        if not (group and colon and name):
            raise PluginError(f"{VARIABLE}: {entry.strip()!r}: must be group:name")
        if group not in _groups:
            known = ", ".join(sorted(_groups))
            raise PluginError(f"{VARIABLE}: {entry.strip()!r}: no such group; there are: {known}")
        found.add((group, name))
    return frozenset(found)
