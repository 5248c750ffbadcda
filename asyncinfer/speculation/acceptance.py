"""`Acceptance`: how often the drafts of one method are right for one answer."""

from __future__ import annotations

import math
from typing import Final

from asyncinfer.speculation.step_costs import DraftCost

__all__ = ["Acceptance"]

#: Factor by which each new draft shrinks the weight of earlier ones.
_FADING: Final = 0.8
#: The initial share counts as if so many tokens had been tried.
_SUPPOSED: Final = 2.0
#: The share of right tokens of a method that never errs.
_ALWAYS: Final = 0.99
#: A draft must save so many times its cost, since both are estimates.
_MARGIN: Final = 1.2
#: The longest draft of a method that has not paid off yet, or no longer does.
_PROBE: Final = 2
#: After so many searches in a row without a result, the next search comes so many tokens later.
_PATIENCE: Final = 4
_UNTIL_LOOK: Final = 8
#: The most tokens of a draft after a wrong one, and the factor by which a draft may grow after a
#: right one: where texts have diverged, it is uncertain where they agree again.
_AFTER_WRONG: Final = 8
_LONGER: Final = 4
#: Tokens of the first rest of a method that does not pay, and of the longest.
_FIRST_REST: Final = 32
_MOST_REST: Final = 1024


class Acceptance:
    """Decides how many tokens to draft. A method that does not pay off rests, each time for longer.
    After a rest one short draft tests it again, unless steps are so full that even a right draft
    would not pay off. A method that finds nothing to draft searches at every eighth token only,
    since an answer decodes faster meanwhile without drafts."""

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
        """`supposed`: the assumed share of right tokens until drafts were verified. A draft has at
        most `most` tokens."""
        self._most = self._limit = most
        self._tried = _SUPPOSED
        self._accepted = supposed * _SUPPOSED
        self._rest = _FIRST_REST
        #: The answer's length at which a rest ends; negative while the method pays off.
        self._resting = 0
        #: Searches in a row without a result, and the answer's length at the next search.
        self._found_nothing = 0
        self._look_at = -1

    @property
    def share(self) -> float:
        """The probability that a drafted token is right if the ones before it are."""
        return min(max(self._accepted / self._tried, 0.01), _ALWAYS)

    @property
    def resting_until(self) -> int:
        """The answer's length at which a draft is tried or searched again; negative where one may
        come now."""
        return max(self._resting, self._look_at)

    def wanted(self, length: int, cost: DraftCost, *, tell: bool = False) -> int:
        """Tokens to draft for an answer of `length` tokens. `tell`: allow a short draft to learn
        its cost, though it is not expected to pay off."""
        if length < self.resting_until:
            return 0
        best = self._best(cost, self.share)
        if best:
            return min(best, self._limit)
        if not tell and not self._best(cost, _ALWAYS):
            # Other answers may end meanwhile, so the next rest is not a longer one.
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
            # The method has paid off; the next draft tells whether that was luck.
            self._resting = 0
        else:
            self._sleep(length)

    def looked(self, length: int, found: bool) -> None:
        """Count a search for a draft, for an answer of `length` tokens."""
        if found:
            self._found_nothing, self._look_at = 0, -1
            return
        self._found_nothing += 1
        if self._found_nothing >= _PATIENCE:
            self._look_at = length + _UNTIL_LOOK

    def failed(self, length: int) -> None:
        """Count a draft that could not be made, for an answer of `length` tokens."""
        self._sleep(length)

    def _best(self, cost: DraftCost, share: float) -> int:
        """The most tokens for which each is right more often than it costs, given the `share` of
        right tokens; 0 where the whole draft does not pay off."""
        if share <= cost.token:
            return 0
        tokens = min(self._most, max(1, int(math.log(max(cost.token, 1e-3)) / math.log(share))))
        right = share * (1 - share**tokens) / (1 - share)
        return tokens if right > _MARGIN * cost.of(tokens) else 0

    def _sleep(self, length: int) -> None:
        self._resting = length + self._rest
        self._rest = min(2 * self._rest, _MOST_REST)
