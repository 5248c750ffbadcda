"""What the gates of the host benchmarks share."""

from __future__ import annotations

import threading
from typing import Literal

from asyncinfer.bench.record import BenchError

__all__ = ["PATIENCE", "Phase", "StartingLine"]

#: Seconds without progress after which a run is given up.
PATIENCE = 60.0


Phase = Literal["launch", "collect"]


class StartingLine:
    """The first step waits until every stream is there, so that all of them decode together from
    their first token to their last. `wait` is for the decode thread, `enter` for the loop's."""

    def __init__(self, streams: int) -> None:
        self._missing = streams
        self._complete = threading.Event()

    def enter(self) -> None:
        """One more stream was submitted."""
        self._missing -= 1
        if not self._missing:
            self._complete.set()

    def open(self) -> None:
        """Let the first step go whoever is missing: nobody reads what it gives."""
        self._complete.set()

    def wait(self) -> None:
        if not self._complete.is_set() and not self._complete.wait(PATIENCE):
            raise BenchError(f"{self._missing} streams were not submitted in {PATIENCE:g} s")
