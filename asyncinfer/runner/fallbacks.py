"""`Fallbacks`: what a runner goes on without, and why."""

from __future__ import annotations

import warnings
from contextlib import suppress
from typing import Literal

from asyncinfer.stats import Fallback
from asyncinfer.telemetry import emit

__all__ = ["Fallbacks"]


class Fallbacks:
    """The decode thread adds to it; any thread may read `found`."""

    def __init__(self) -> None:
        #: In the order in which they were found. Replaced as a whole.
        self.found: tuple[Fallback, ...] = ()

    def add(self, part: Literal["kernels", "graphs", "products", "attention"], reason: str) -> None:
        """Note that `part` is not used from now on. The first note is a warning, too, since nobody
        may listen to the log."""
        fallback = Fallback(part, reason)
        first, self.found = not self.found, (*self.found, fallback)
        emit("fallback", part=part, reason=reason)
        if first:
            # A filter may make an error of it, which nobody could catch in a step.
            with suppress(RuntimeWarning):
                text = f"{fallback}; see stats().fallbacks and `asyncinfer doctor`"
                warnings.warn(text, RuntimeWarning, stacklevel=2)
