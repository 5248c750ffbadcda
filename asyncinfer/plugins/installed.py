"""Entry points of installed distributions: read once, and again when `sys.path` or a folder in it
has changed.

Reading them all takes tens of milliseconds. `importlib.metadata.entry_points()` fails altogether if
the entry points of one distribution cannot be read; here such a distribution is skipped and noted.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from importlib.metadata import (
    Distribution,
    EntryPoint,
    PackageNotFoundError,
    distribution,
    distributions,
)

__all__ = ["Installed", "installed", "origin"]

#: The folders of `sys.path`, and when each last changed.
Stamp = tuple[tuple[str, int | None], ...]


@dataclass(frozen=True, slots=True)
class Installed:
    """The entry points of all installed distributions."""

    #: Entry points by group.
    points: Mapping[str, tuple[EntryPoint, ...]]
    #: Distributions whose entry points cannot be read though they name asyncinfer, and why.
    unreadable: tuple[tuple[str, str], ...]


_last: tuple[Stamp, Installed] | None = None


def installed() -> Installed:
    """The entry points as they are now. From any thread; takes microseconds if nothing changed."""
    global _last
    stamp = _stamp()
    last = _last
    if last is None or last[0] != stamp:
        # Two threads may both read, and then find the same.
        last = _last = stamp, _read()
    return last[1]


def origin(point: EntryPoint) -> str:
    """The distribution of an entry point, with its version."""
    return "an unknown distribution" if point.dist is None else _title(point.dist)


def _stamp() -> Stamp:
    return tuple((folder, _changed(folder)) for folder in sys.path)


def _changed(folder: str) -> int | None:
    try:
        return os.stat(folder or os.curdir).st_mtime_ns
    except (OSError, ValueError):
        return None


def _read() -> Installed:
    points: dict[str, list[EntryPoint]] = {}
    unreadable: list[tuple[str, str]] = []
    for dist in distributions():
        try:
            found = tuple(dist.entry_points)
        # The file was written by any build tool, and parsing it may raise anything.
        except Exception as error:
            if _names_us(dist):
                unreadable.append((_title(dist), repr(error)))
            continue
        for point in found:
            points.setdefault(point.group, []).append(point)
    kept = {group: tuple(filter(_is_first, found)) for group, found in points.items()}
    return Installed({group: found for group, found in kept.items() if found}, tuple(unreadable))


def _is_first(point: EntryPoint) -> bool:
    """Whether the point's distribution is the one that is imported: of two versions on the path
    that is the first."""
    if point.dist is None or "asyncinfer" not in point.group:
        return True
    name = _field(point.dist, "Name")
    try:
        return not name or point in tuple(distribution(name).entry_points)
    except PackageNotFoundError:
        return True


def _names_us(dist: Distribution) -> bool:
    try:
        return "asyncinfer" in (dist.read_text("entry_points.txt") or "")
    except Exception:
        return False


def _title(dist: Distribution) -> str:
    try:
        name, version = (_field(dist, key) for key in ("Name", "Version"))
    except Exception:
        name = version = ""
    return f"{name or 'a distribution without a name'} {version}".rstrip()


def _field(dist: Distribution, name: str) -> str:
    """A field of a distribution's metadata, "" without it. To index what is missing warns, and will
    raise."""
    return dist.metadata[name] or "" if name in dist.metadata else ""
