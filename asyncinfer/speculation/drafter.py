"""`Drafter`: the drafts of one answer."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final

from asyncinfer.params import SamplingParams
from asyncinfer.speculation.acceptance import Acceptance
from asyncinfer.speculation.packed_tokens import PackedTokens
from asyncinfer.speculation.prediction import Prediction
from asyncinfer.speculation.step_costs import DraftCost

__all__ = ["GRAMMAR", "MOST_DRAFTED", "PREDICTION", "AnswerView", "Drafter", "expected_share"]

#: Tokens of a draft at most.
MOST_DRAFTED: Final = 32
#: The method's name of drafts from the caller's own text.
PREDICTION: Final = "prediction"
#: The method of drafts that an answer's format forces.
GRAMMAR: Final = "grammar"
#: The most tokens that the model predicts with one draw.
_PREDICTED: Final = 5
#: The share of drafted tokens taken to be right at first: of predictions and formats, and of all
#: others.
_EXPECTED: Final = 0.9
_GUESSED: Final = 0.7


def expected_share(method: str) -> float:
    """The assumed share of right tokens of a method before any was verified."""
    return _EXPECTED if method in (PREDICTION, GRAMMAR) else _GUESSED


class AnswerView:
    """What a proposer is shown; see `asyncinfer.protocols.DraftRequest`."""

    __slots__ = ("_drafter", "state")

    def __init__(self, drafter: Drafter) -> None:
        self._drafter = drafter
        self.state: Any = None

    @property
    def length(self) -> int:
        return len(self._drafter.known)

    @property
    def prompt_len(self) -> int:
        return self._drafter.prompt_len

    @property
    def most(self) -> int:
        return self._drafter.wanted

    @property
    def scope(self) -> str:
        return self._drafter.scope

    @property
    def seed(self) -> int:
        return self._drafter.seed

    @property
    def params(self) -> SamplingParams:
        return self._drafter.params

    def tokens(self, start: int = 0) -> list[int]:
        return self._drafter.known[start:]


class Drafter:
    """The state of one answer's drafts. Decode thread only, once it is made."""

    __slots__ = (
        "_ahead",
        "accepted",
        "cost",
        "draft",
        "forced",
        "known",
        "method",
        "methods",
        "most",
        "params",
        "predicted",
        "prediction",
        "predictor",
        "prompt_len",
        "rejected",
        "rows",
        "scope",
        "seed",
        "views",
        "wanted",
    )

    def __init__(
        self,
        params: SamplingParams,
        prompt_len: int,
        seed: int,
        *,
        scope: str = "",
        prediction: PackedTokens | None = None,
        forced: Callable[[int], Sequence[int]] | None = None,
        most: int = MOST_DRAFTED,
        rows: int = 1,
        predictor: str = "",
    ) -> None:
        """
        Args:
            seed: key of the random numbers of its draws.
            prediction: the tokens that the caller expects, which answers may share; None: none.
            forced: returns up to so many tokens that must come next by the answer's format; None
                without a format, or where these are appended without a draw.
            most: tokens of a draft at most.
            rows: how many rows of a step compute each drafted token: two with a guide.
            predictor: the method by which the model itself predicts the tokens after its draws; or
                "".
        """
        self.params: Final = params
        self.prompt_len: Final = prompt_len
        self.seed: Final = seed
        self.scope: Final = scope
        self.most: Final = most
        self.rows: Final = rows
        self.predictor: Final = predictor
        self.forced: Final = forced
        self.prediction: Final = Prediction(prediction) if prediction else None
        #: All known tokens of prompt and answer: the sequence's own list, as far as committed.
        self.known: list[int] = []
        #: The model's last prediction: a position, and the tokens that may come there.
        self.predicted: tuple[int, Sequence[int]] = -1, ()
        #: How many predicted tokens were last asked for.
        self._ahead = _PREDICTED
        #: The draft to verify next, how it was made, and how many tokens were asked for.
        self.draft: Sequence[int] = ()
        self.method = ""
        self.wanted = 0
        #: The draft's cost, as estimated when it was made.
        self.cost = DraftCost(0.0)
        #: How often drafts of each method are right.
        self.methods: dict[str, Acceptance] = {}
        #: What each proposer is shown.
        self.views: dict[str, AnswerView] = {}
        #: Drafted tokens that were right, and those that were wrong.
        self.accepted = 0
        self.rejected = 0

    def want(
        self, method: str, cost: DraftCost, shares: Mapping[str, float], *, tell: bool = False
    ) -> bool:
        """Whether a draft by this method may pay off; `wanted` is then its most tokens. `shares` of
        right tokens are those of other answers; `tell` as in `Acceptance.wanted`."""
        acceptance = self.methods.get(method)
        if acceptance is None:
            supposed = min(expected_share(method), shares.get(method, 1.0))
            most = min(self.most, _PREDICTED) if method == self.predictor else self.most
            acceptance = self.methods[method] = Acceptance(supposed, most)
        self.wanted, self.cost = acceptance.wanted(len(self.known), cost, tell=tell), cost
        if method == self.predictor:
            self._ahead = self.wanted
        return self.wanted > 0

    @property
    def predicts(self) -> int:
        """How many tokens the model should predict with its next draw: as many as were last asked
        for."""
        tried = self.methods.get(self.predictor)
        rests = tried is not None and tried.resting_until > len(self.known) + 1
        if not self.predictor or rests:
            return 0
        return max(1, min(self._ahead, self.most))

    @property
    def resting_until(self) -> int:
        """The length from which on any of its methods may have a draft again; negative: one may
        have one now."""
        return min([each.resting_until for each in self.methods.values()], default=-1)

    def rest(self, method: str) -> None:
        """The method took time and made no draft: do not ask it for a while."""
        self.methods[method].failed(len(self.known))

    def put(self, method: str, tokens: Sequence[int]) -> None:
        """Set the next draft."""
        self.method, self.draft = method, tokens[: self.wanted]

    def found(self, method: str, tokens: Sequence[int]) -> None:
        """Set the next draft to the tokens that a method found in texts, if any."""
        self.methods[method].looked(len(self.known), bool(tokens))
        self.put(method, tokens)

    def verified(self, drafted: int, accepted: int) -> None:
        """Count `drafted` tokens of the draft that were computed, of which `accepted` are right."""
        self.accepted += accepted
        self.rejected += drafted - accepted
        self.methods[self.method].verified(len(self.known), drafted, accepted, self.cost)
        self.draft = ()
