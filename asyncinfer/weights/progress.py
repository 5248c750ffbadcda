"""How far a model has been loaded."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

__all__ = ["LoadProgress", "OnProgress"]


@dataclass(frozen=True, slots=True)
class LoadProgress:
    """One step of loading a checkpoint's weights."""

    #: Bytes of weights on the device so far, as stored in the checkpoint.
    bytes_done: int
    bytes_total: int
    #: The tensor that was just loaded; empty before the first.
    tensor: str = ""


OnProgress = Callable[[LoadProgress], None]
