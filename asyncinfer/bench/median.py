"""The median of repeated measurements, as the whole measurement it was."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TypeVar

__all__ = ["median"]

T = TypeVar("T")


def median(runs: Sequence[T], figure: Callable[[T], float]) -> T:
    """The run in the middle by `figure`; of an even number of runs the lower one of the two."""
    return sorted(runs, key=figure)[(len(runs) - 1) // 2]
