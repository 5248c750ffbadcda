"""The type of a callback that is told how far a model has been loaded."""

from __future__ import annotations

from collections.abc import Callable

from asyncinfer.chunk import LoadProgress

__all__ = ["LoadProgress", "OnProgress"]

OnProgress = Callable[[LoadProgress], None]
