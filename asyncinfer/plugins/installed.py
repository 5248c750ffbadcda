"""Entry points of installed distributions: read once, and again when `sys.path` or a folder in it
has changed.

Reading them all takes tens of milliseconds. One distribution whose entry points cannot be read
makes `importlib.metadata.entry_points()` fail for everybody; here it is skipped and noted.
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
    """What is installed."""

    #: Entry points by group.
    points: Mapping[str, tuple[EntryPoint, ...]]
    #: Distributions whose entry points cannot be read though they name asyncinfer, and why.
    unreadable: tuple[tuple[str, str], ...]


_last: tuple[Stamp, Installed] | None = None


def installed() -> Installed:
    """What is installed now. From any thread; where nothing has changed it takes microseconds."""
    global _last
    stamp = _stamp()
    last = _last
    if last is None or last[0] != stamp:
        # Two threads may both read it; they find the same.
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
        # It is whatever somebody's build tool has written.
        except Exception as error:
            if _names_us(dist):
                unreadable.append((_title(dist), repr(error)))
            continue
        for point in found:
            points.setdefault(point.group, []).append(point)
    kept = {group: tuple(filter(_is_first, its)) for group, its in points.items()}
    return Installed({group: its for group, its in kept.items() if its}, tuple(unreadable))


def _is_first(point: EntryPoint) -> bool:
    """Whether its distribution is the one that is imported: of two versions on the path, the
    second has no say."""
    if point.dist is None or "asyncinfer" not in point.group:
        return True
    try:
        return point in tuple(distribution(point.dist.name).entry_points)
    except (PackageNotFoundError, ValueError, TypeError):
        # It has no name by which it could be found.
        return True


def _names_us(dist: Distribution) -> bool:
    try:
        return "asyncinfer" in (dist.read_text("entry_points.txt") or "")
    except Exception:
        return False


def _title(dist: Distribution) -> str:
    try:
        name, version = (dist.metadata[key] or "" for key in ("Name", "Version"))
    except Exception:
        name = version = ""
    return f"{name or 'a distribution without a name'} {version}".rstrip()
