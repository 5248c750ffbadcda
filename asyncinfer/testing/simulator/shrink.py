"""Making a failing list of actions small (delta debugging; Zeller and Hildebrandt, 2002)."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TypeVar

__all__ = ["shrink"]

T = TypeVar("T")


def shrink(items: Sequence[T], fails: Callable[[list[T]], bool], most: int = 400) -> list[T]:
    """The smallest list that still fails which is found by leaving out runs of `items`, in at most
    `most` calls of `fails`. `items` themselves are known to fail."""
    kept, size, calls = list(items), max(1, len(items) // 2), 0
    while True:
        start, smaller = 0, False
        while start < len(kept):
            fewer = kept[:start] + kept[start + size :]
            if calls >= most:
                return kept
            calls += 1
            if fails(fewer):
                kept, smaller = fewer, True
            else:
                start += size
        if size > 1:
            size //= 2
        elif not smaller:
            return kept
