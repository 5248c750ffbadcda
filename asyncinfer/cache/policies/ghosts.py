"""`Ghosts`: what a policy remembers of prefixes that left the cache."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Generic, TypeVar

__all__ = ["Ghosts"]

T = TypeVar("T")


class Ghosts(Generic[T]):
    """Keys of removed blocks with a note each, the oldest first. O(1)."""

    def __init__(self) -> None:
        self._notes: dict[bytes, T] = {}

    def __len__(self) -> int:
        return len(self._notes)

    def add(self, key: bytes, note: T) -> None:
        self._notes.pop(key, None)
        self._notes[key] = note

    def take(self, key: bytes) -> T | None:
        """Remove and return the note of a prefix that came back; None if there is none."""
        return self._notes.pop(key, None)

    def trim(self, size: int) -> Iterator[T]:
        """Forget the oldest until at most `size` are left; yields the notes forgotten."""
        while len(self._notes) > size:
            yield self._notes.pop(next(iter(self._notes)))
