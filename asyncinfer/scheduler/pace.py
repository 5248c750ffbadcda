"""`Pace`: how far the decode loop runs ahead of the device."""

from __future__ import annotations

from collections.abc import Sequence
from math import inf
from typing import Final

from asyncinfer.scheduler.step import Step

__all__ = ["FULL_STEPS", "Pace"]

#: Seconds of work to have on the device. Other Python threads keep the decode thread from running
#: for about so long, and the device must not run idle meanwhile. More work would be thrown away
#: past a stop, and would keep new requests waiting.
AHEAD: Final = 2e-3
#: The same at most where the device has run idle. A thread that computes hands over the GIL after 5
#: ms, unless `sys.setswitchinterval` says otherwise.
MOST_AHEAD: Final = 8e-3
#: Steps in flight at most, unless the device has run idle; and the full steps for which memory is
#: set aside.
FULL_STEPS: Final = 4
#: Weight of the last step in the average.
_LAST: Final = 0.1
#: A time between steps counts as this many average ones at most.
_OUTLIER: Final = 4.0
#: Seconds for which it is recalled how long the decode thread was away, because a step tells only
#: when it is committed that it was late.
_RECALL: Final = 0.1
#: Seconds that the device has more work after the decode thread was kept away last.
_COVER_FOR: Final = 1.0


class Pace:
    """Decides how many steps are in flight: one more than runs, or several if steps are short.

    Where another thread keeps the decode thread from running for longer, and the device has run
    idle meanwhile, as many steps are in flight as it computes in that time. So it is until the
    decode thread has not been kept away for a second.

    Args:
        fixed: steps in flight that were asked for; None leaves them to the pace.
        most: steps in flight that serve the runner; 1 where it computes within `launch` all but
            those that it queues.
        max_step_tokens: query tokens that a step may have.
    """

    def __init__(self, fixed: int | None, most: int, max_step_tokens: int) -> None:
        self._least = min(2, most) if fixed is None else fixed
        self._most = most if fixed is None else fixed
        self._queues = fixed is None
        self._most_tokens = (FULL_STEPS - 1) * max_step_tokens
        self._before: float | None = None
        self._seconds = 0.0
        #: The longest time that the decode thread was away of late, and until when that counts.
        self._away, self._recalled_until = 0.0, -inf
        #: Seconds of work on the device while the decode thread is kept away; until when.
        self._cover, self._covered_until = AHEAD, -inf
        #: The most steps in flight, unless a runner has queued them.
        self.ahead = self._least

    def wants(self, in_flight: Sequence[Step], *, queues: bool = True) -> bool:
        """Whether another step should be launched while these are in flight. Pages of windows are
        set aside for `FULL_STEPS` steps of the most tokens. `queues`: the next step may follow
        those that the runner has queued, see `Step.queued`. These have few tokens: a row for which
        there is no page of a window waits for them."""
        if queues and self._queues and in_flight and len(in_flight) < in_flight[-1].queued:
            return True
        if len(in_flight) >= self.ahead:
            return False
        return len(in_flight) < FULL_STEPS or (
            sum(step.tokens for step in in_flight) <= self._most_tokens
        )

    def stepped(self, now: float | None, *, late: bool = False) -> None:
        """A step was committed at `now`, in seconds, with another one in flight; None: with none in
        flight, so the time to the next commit measures nothing. The step was `late` if the device
        had nothing to do when it was launched."""
        before, self._before = self._before, now
        if self._least == self._most or now is None or before is None:
            return
        seconds, between = self._seconds, now - before
        if seconds:
            self._note_absence(now, between, late)
            # A decode thread that was kept away says little of how long a step takes.
            between = min(between, _OUTLIER * seconds)
        self._seconds += _LAST * (between - seconds) if seconds else between
        if self._seconds <= 0:
            self.ahead = min(self._most, FULL_STEPS)
        elif now > self._covered_until:
            steps = round(AHEAD / self._seconds)
            self.ahead = max(self._least, min(self._most, FULL_STEPS, steps))
        else:
            steps = 1 + round(self._cover / self._seconds)
            self.ahead = max(self._least, min(self._most, steps))

    def _note_absence(self, now: float, between: float, late: bool) -> None:
        if between > max(AHEAD, _OUTLIER / 2 * self._seconds):
            recent = self._away if now <= self._recalled_until else 0.0
            self._away, self._recalled_until = max(recent, between), now + _RECALL
            if now <= self._covered_until:
                self._covered_until = now + _COVER_FOR
        if late and now <= self._recalled_until:
            cover = self._cover if now <= self._covered_until else AHEAD
            self._cover = min(MOST_AHEAD, max(cover, self._away))
            self._covered_until = now + _COVER_FOR
