"""`ChainPace`: how many decode steps are computed in one go."""

from __future__ import annotations

from typing import Final

__all__ = ["MOST_CHAINED", "ChainPace"]

#: The most steps that are computed in one go.
MOST_CHAINED: Final = 4
#: Seconds that they should take. The tokens of all come at the end.
_CHAIN: Final = 0.05
#: The share of the time without a core or the GIL from which on there are several. Event loops
#: take less of it after each step.
_MUCH: Final = 0.1
#: Weight of the last time in the average.
_LAST: Final = 0.1


class ChainPace:
    """Chooses the number of steps.

    It is one, so that each token comes as soon as it is drawn. Where the decode thread has long
    waited for a core or the GIL, it is as many as take `_CHAIN` seconds: another thread that
    computes keeps the GIL for up to 5 ms each time, in which a CPU computes nothing.
    """

    def __init__(self) -> None:
        self._each = 1.0
        self._away = 0.0

    @property
    def steps(self) -> int:
        """How many steps to compute in one go."""
        if self._away < _MUCH:
            return 1
        return max(1, min(MOST_CHAINED, round(_CHAIN / self._each)))

    def computed(self, steps: int, seconds: float, away: float) -> None:
        """So many steps took `seconds`, in `away` of which the decode thread did not compute, see
        `Replayer`."""
        if seconds > 0.0:
            self._each = seconds / steps
            self._away += _LAST * (min(max(away / seconds, 0.0), 1.0) - self._away)
