"""`StepBudget`: how many query tokens a step may have."""

from __future__ import annotations

__all__ = ["StepBudget"]

#: Steps computed before the budget doubles again, at first and at most.
PATIENCE = 8
MOST_PATIENCE = 1024


class StepBudget:
    """All that there are, until the device has no room for a step: then half of that step.

    After `PATIENCE` computed steps it doubles. Every lack of room doubles the patience, too: where
    the device is small for good, next to no step is computed in vain.
    """

    def __init__(self, most: int) -> None:
        #: Query tokens of the next step.
        self.tokens = most
        self._most = most
        self._patience = PATIENCE
        self._computed = 0

    def shrink(self, tokens: int) -> None:
        """A step of so many query tokens was too large. Preempting would not help, for blocks are
        allocated whether or not they are used."""
        self.tokens = max(1, tokens // 2)
        self._patience = min(MOST_PATIENCE, 2 * self._patience)
        self._computed = 0

    def computed(self, *, retried: bool) -> None:
        """A step was computed. `retried`: with a part of a prompt that had no room before, and
        would fail if it had none again."""
        if self.tokens == self._most and self._patience == PATIENCE:
            return
        self._computed = 0 if retried else self._computed + 1
        if self._computed < self._patience:
            return
        self._computed = 0
        if self.tokens < self._most:
            self.tokens = min(self._most, 2 * self.tokens)
        else:
            self._patience //= 2
