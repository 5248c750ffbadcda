"""`Acceptance`: how often the drafts of one method are right for one answer."""

from __future__ import annotations

import math
from typing import Final

from asyncinfer.speculation.step_costs import DraftCost

__all__ = ["Acceptance"]

#: Factor by which each new draft shrinks the weight of earlier ones.
_FADING: Final = 0.8
#: Tokens that the initial share counts for, as if they had been tried.
_SUPPOSED: Final = 2.0
#: The share of right tokens of a method that is always right.
_ALWAYS: Final = 0.99
#: What a draft brings has to be so many times what it costs: both are estimates.
_MARGIN: Final = 1.2
#: The longest draft of a method that has not paid yet, or no longer.
_PROBE: Final = 2
#: After so many looks in a row that found nothing, the next one comes so many tokens later.
_PATIENCE: Final = 4
_UNTIL_LOOK: Final = 8
#: Tokens at most of a draft after one that was wrong somewhere, and the factor by which one after a
#: right one may be longer: where texts differ, it is not sure where they meet again.
_AFTER_WRONG: Final = 8
_LONGER: Final = 4
#: Tokens of the first rest of a method that does not pay, and of the longest.
_FIRST_REST: Final = 32
_MOST_REST: Final = 1024


class Acceptance:
    """Says how many tokens to draft. A method that does not pay rests, each time for longer. After
    a rest one short draft tells whether it has become better, unless steps are so full that no
    draft would pay even if all of it were right. One that finds nothing to draft looks at every
    eighth token only, since an answer without drafts decodes faster meanwhile."""

    __slots__ = (
        "_accepted",
        "_found_nothing",
        "_limit",
        "_look_at",
        "_most",
        "_rest",
        "_resting",
        "_tried",
    )

    def __init__(self, supposed: float, most: int) -> None:
        """`supposed`: the share of right tokens that counts until drafts were verified. A draft has
        `most` tokens at most."""
        self._most = self._limit = most
        self._tried = _SUPPOSED
        self._accepted = supposed * _SUPPOSED
        self._rest = _FIRST_REST
        #: The length at which a rest ends; negative where the method pays.
        self._resting = 0
        #: Steps in a row in which nothing was found, and the length at which to look again.
        self._found_nothing = 0
        self._look_at = -1

    @property
    def share(self) -> float:
        """The probability that a drafted token is right if the ones before it are."""
        return min(max(self._accepted / self._tried, 0.01), _ALWAYS)

    @property
    def resting_until(self) -> int:
        """The length of the answer at which a draft is tried or looked for again; negative where
        one may come now."""
        return max(self._resting, self._look_at)

    def wanted(self, length: int, cost: DraftCost, *, tell: bool = False) -> int:
        """Tokens to draft for an answer that is `length` tokens long. `tell`: a short draft serves
        to learn what it costs, though it is not expected to pay."""
        if length < self.resting_until:
            return 0
        best = self._best(cost, self.share)
        if best:
            return min(best, self._limit)
        if not tell and not self._best(cost, _ALWAYS):
            # Other answers may end meanwhile, so the rest is not a longer one.
            self._resting = length + _FIRST_REST
        elif self._resting >= 0:
            return min(self._most, _PROBE)
        else:
            self._sleep(length)
        return 0

    def verified(self, length: int, drafted: int, accepted: int, cost: DraftCost) -> None:
        """Count a verified draft; its tokens after the first wrong one say nothing."""
        tried = min(drafted, accepted + 1)
        self._tried = _FADING * self._tried + tried
        self._accepted = _FADING * self._accepted + accepted
        right = accepted == drafted
        self._limit = min(self._most, _LONGER * self._limit if right else _AFTER_WRONG)
        if self._best(cost, self.share):
            self._rest, self._resting = _FIRST_REST, -1
        elif right:
            # It has paid, and the next one tells whether that was luck.
            self._resting = 0
        else:
            self._sleep(length)

    def looked(self, length: int, found: bool) -> None:
        """Count a look for something to draft, for an answer that is `length` tokens long."""
        if found:
            self._found_nothing, self._look_at = 0, -1
            return
        self._found_nothing += 1
        if self._found_nothing >= _PATIENCE:
            self._look_at = length + _UNTIL_LOOK

    def failed(self, length: int) -> None:
        """Count a draft that could not be made, of an answer that is `length` tokens long."""
        self._sleep(length)

    def _best(self, cost: DraftCost, share: float) -> int:
        """The length up to which each token is right more often than it costs, where a `share` of
        tokens is right; 0 where the whole draft does not pay."""
        if share <= cost.token:
            return 0
        tokens = min(self._most, max(1, int(math.log(max(cost.token, 1e-3)) / math.log(share))))
        right = share * (1 - share**tokens) / (1 - share)
        return tokens if right > _MARGIN * cost.of(tokens) else 0

    def _sleep(self, length: int) -> None:
        self._resting = length + self._rest
        self._rest = min(2 * self._rest, _MOST_REST)
