"""`QueuePace`: how many decode steps are in flight on a CPU."""

from __future__ import annotations

from typing import Final

__all__ = ["MOST_QUEUED", "QueuePace"]

#: The most steps in flight.
MOST_QUEUED: Final = 8
#: Seconds of work to have besides the step that is computed, and the most steps for them, where
#: nobody else computes. Python's part of a step then comes while the one before is computed. What
#: is launched is in the way of whoever comes next.
_AHEAD: Final = 0.006
_MOST_AHEAD: Final = 2
#: Seconds that all steps in flight should take where others do. A thread that computes keeps the
#: GIL for up to 5 ms each time, and the Python part of a step asks for it more than once.
_BESIDE: Final = 0.05
#: The share of the time without a core or the GIL from which on others compute. Event loops take
#: less of it after each step.
_MUCH: Final = 0.1
#: Weight of the last time in the average.
_LAST: Final = 0.1


class QueuePace:
    """Chooses the number of steps: one more than is computed where they are short, and more where
    other threads and programs keep the decode thread from its core or the GIL."""

    def __init__(self) -> None:
        #: Averages: seconds of a step, 0 if there was none; and the share that it was away.
        self._each = 0.0
        self._away = 0.0

    @property
    def steps(self) -> int:
        """How many steps to have in flight."""
        if not self._each:
            return 1
        if self._away < _MUCH:
            return 1 + min(_MOST_AHEAD, round(_AHEAD / self._each))
        return max(1, min(MOST_QUEUED, round(_BESIDE / self._each)))

    def computed(self, seconds: float, away: float) -> None:
        """A step took `seconds`, in `away` of which it was not computed, see `Replayer`."""
        if seconds > 0.0:
            self._each += _LAST * (seconds - self._each) if self._each else seconds
            self._away += _LAST * (min(max(away / seconds, 0.0), 1.0) - self._away)
