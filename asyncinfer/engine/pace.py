"""`Pace`: how many steps ahead of the device the decode loop runs."""

from __future__ import annotations

from typing import Final

__all__ = ["Pace"]

#: Seconds of work to have on the device. Other Python threads keep the decode thread from running
#: for about so long, and the device must not run idle meanwhile. More work would be thrown away
#: past a stop, and would keep new requests waiting.
AHEAD: Final = 2e-3
#: Weight of the last step in the average.
_LAST: Final = 0.1


class Pace:
    """Launches the next step while one runs, and a few more where steps are short.

    Args:
        fixed: steps in flight that were asked for; None leaves them to the pace.
        most: steps in flight that serve the runner; 1 where it computes within `launch`.
    """

    def __init__(self, fixed: int | None, most: int) -> None:
        self._least = min(2, most) if fixed is None else fixed
        self._most = most if fixed is None else fixed
        self._before: float | None = None
        self._seconds = 0.0
        #: Steps in flight at most.
        self.ahead = self._least

    def stepped(self, now: float | None) -> None:
        """A step was committed at `now`, in seconds, with another in flight; None: with none, so
        that what comes next measures nothing."""
        before, self._before = self._before, now
        if self._least == self._most or now is None or before is None:
            return
        self._seconds += _LAST * (now - before - self._seconds) if self._seconds else now - before
        steps = AHEAD / self._seconds if self._seconds > 0 else self._most
        self.ahead = max(self._least, min(self._most, round(steps)))
