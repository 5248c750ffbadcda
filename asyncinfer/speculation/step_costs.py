"""`StepCosts`: by how much drafted tokens make a decode step longer."""

from __future__ import annotations

from typing import Final, NamedTuple

__all__ = ["DraftCost", "StepCosts"]

#: Time of a query token as a share of its step's, before anything was measured.
_SUPPOSED: Final = 0.06
#: Steps without drafts after which their time is known.
_KNOWN: Final = 4
#: After so many steps without drafts, the cost of drafts may have changed.
_STALE: Final = 256
#: Weight of the newest step.
_NEWEST: Final = 0.03
#: A step that took so many times the expected time was slow for another reason.
_OUTLIER: Final = 4.0


class DraftCost(NamedTuple):
    """What a draft costs, in the tokens that its step would draw in that time without drafts."""

    #: Cost of each drafted token.
    token: float
    #: Cost of any draft at all: a step of several tokens a row may run other operators.
    draft: float = 0.0

    def of(self, tokens: int) -> float:
        return self.draft + tokens * self.token

    def times(self, rows: int) -> DraftCost:
        """The cost of a draft each of whose tokens `rows` rows compute."""
        return DraftCost(rows * self.token, self.draft)


class StepCosts:
    """Estimates, learned from the times of decode steps with drafts and without."""

    def __init__(self) -> None:
        self._plain = _Line()
        self._drafted = _Line()
        #: Steps since the last one with drafts.
        self._without = 0

    def add(self, tokens: int, seconds: float, drafted: bool) -> None:
        """Learn from a step of `tokens` query tokens that took `seconds`."""
        (self._drafted if drafted else self._plain).add(tokens, seconds)
        self._without = 0 if drafted else self._without + 1

    @property
    def known(self) -> bool:
        """Whether it was measured what steps take without drafts."""
        return self._plain.steps >= _KNOWN

    @property
    def stale(self) -> bool:
        """Whether the cost of drafts was last measured long ago."""
        return self._without >= _STALE

    def seconds(self, rows: int) -> float:
        """Seconds of a step of `rows` rows without drafts; 0.0 before it was measured."""
        return self._plain.at(rows) if self.known else 0.0

    def cost(self, rows: int, draws: int | None = None) -> DraftCost:
        """The cost of a draft of one row, in a step of `rows` rows of which `draws` give an answer
        a token; None: all of them."""
        plain, drafted = self._plain, self._drafted
        draws = rows if draws is None else draws
        if not plain.seconds:
            return DraftCost(_SUPPOSED * draws / (1 + _SUPPOSED * rows))
        rate = draws / plain.at(rows)
        if not drafted.seconds:
            return DraftCost(plain.slope * rate)
        return DraftCost(drafted.slope * rate, max(0.0, drafted.at(rows) - plain.at(rows)) * rate)


class _Line:
    """A line through seconds over tokens: least squares, in which a step counts for less the longer
    ago it was."""

    def __init__(self) -> None:
        self._begin()

    def _begin(self) -> None:
        self.seconds = 0.0
        self.steps = 0
        self._tokens = self._squares = self._products = 0.0

    def add(self, tokens: int, seconds: float) -> None:
        if self.seconds:
            # Drafts differ in length, so a step is compared with others of as many tokens.
            expected = self.at(tokens)
            most = _OUTLIER * max(expected, self.seconds)
            if seconds > most:
                seconds = most
            elif self.steps <= _KNOWN and expected > _OUTLIER * seconds:
                # The first steps of an engine compile and cache, which later steps do not.
                self._begin()
        self.steps += 1
        newest = max(_NEWEST, 1 / self.steps)
        self._tokens += newest * (tokens - self._tokens)
        self.seconds += newest * (seconds - self.seconds)
        self._squares += newest * (tokens * tokens - self._squares)
        self._products += newest * (tokens * seconds - self._products)

    @property
    def slope(self) -> float:
        """Seconds that one more token takes."""
        # Measured times are noisy: a token costs something, and no more than the whole step.
        each = self.seconds / max(1.0, self._tokens)
        spread = self._squares - self._tokens * self._tokens
        if spread < 0.25:
            return _SUPPOSED * self.seconds / (1 + _SUPPOSED * self._tokens)
        slope = (self._products - self._tokens * self.seconds) / spread
        return min(max(slope, 0.01 * each), each)

    def at(self, tokens: int) -> float:
        """Seconds of a step of so many tokens."""
        return max(self.seconds + self.slope * (tokens - self._tokens), 1e-9)
