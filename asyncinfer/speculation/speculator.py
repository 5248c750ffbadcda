"""`Speculator`: the drafts of a step."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Final, Protocol

from asyncinfer.protocols import DraftRequest
from asyncinfer.speculation.counters import DraftCounters
from asyncinfer.speculation.drafter import GRAMMAR, PREDICTION, AnswerView, Drafter, expected_share
from asyncinfer.speculation.guarded_proposer import GuardedProposer
from asyncinfer.speculation.step_costs import StepCosts

__all__ = ["DraftingModel", "Speculator"]

#: The weight of a new draft in the share of right tokens of all answers.
_NEWEST: Final = 0.1


class DraftingModel(Protocol):
    """A model that drafts: `asyncinfer.scheduler.DraftModel`."""

    @property
    def name(self) -> str: ...

    @property
    def read_prompts(self) -> bool:
        """Whether the last drafts took time for prompts, too."""

    @property
    def failed(self) -> Collection[DraftRequest]:
        """The answers on which the last drafts spent time without a result."""

    def propose(self, requests: Sequence[DraftRequest]) -> Sequence[Sequence[int]]: ...

    def end(self, request: DraftRequest) -> None:
        """Give up what it holds of an answer. It may be asked for it again."""

    def close(self) -> None: ...


class Speculator:
    """Asks for drafts where they may pay off, and learns from their verification.

    An answer's draft is the text that its format forces, else the caller's prediction where the
    answer agrees with it, else the draft of the first proposer that has one. A draft model comes
    last, since its drafts cost most.
    """

    def __init__(
        self, proposers: Sequence[GuardedProposer] = (), model: DraftingModel | None = None
    ) -> None:
        self.proposers = (*proposers, *(() if model is None else (model,)))
        self._model = model
        self.costs = StepCosts()
        self.counters = DraftCounters()
        #: The share of right tokens by method, with which a new answer begins.
        self._shares: dict[str, float] = {}

    def draft(self, drafters: Sequence[Drafter], rows: int, draws: int) -> bool:
        """Set the next draft of each drafter, or none; their `known` must be current. The step has
        `rows` decode rows and `draws` answers that get a token each. Returns whether a draft model
        read prompts, which takes longer than drafting."""
        read_prompts = False
        one_row = self.costs.cost(rows, draws)
        costs = {drafter: one_row.times(drafter.rows) for drafter in drafters}
        # One short draft tells the current cost of drafts, so that no method is off for good.
        telling = drafters[0] if drafters and self.costs.stale else None

        def wants(drafter: Drafter, method: str) -> bool:
            tell = drafter is telling
            return drafter.want(method, costs[drafter], self._shares, tell=tell)

        without = []
        for drafter in drafters:
            drafter.draft = ()
            if drafter.forced is not None and wants(drafter, GRAMMAR):
                drafter.put(GRAMMAR, drafter.forced(drafter.wanted))
            expected = None if drafter.draft else drafter.prediction
            if expected is not None and wants(drafter, PREDICTION):
                answer = drafter.known[drafter.prompt_len :]
                drafter.found(PREDICTION, expected.following(answer, drafter.wanted))
            if not drafter.draft:
                without.append(drafter)
        for proposer in self.proposers:
            if proposer is self._model and not self.costs.known:
                # It drafts in every step, and so nothing would tell what it costs.
                continue
            asked = [drafter for drafter in without if wants(drafter, proposer.name)]
            if asked:
                views = [_view(drafter, proposer.name) for drafter in asked]
                put = Drafter.put if proposer is self._model else Drafter.found
                for drafter, tokens in zip(asked, proposer.propose(views), strict=True):
                    put(drafter, proposer.name, tokens)
                if self._model is not None and proposer is self._model:
                    read_prompts = self._model.read_prompts
                    for drafter, view in zip(asked, views, strict=True):
                        if view in self._model.failed:
                            drafter.rest(proposer.name)
                without = [drafter for drafter in without if not drafter.draft]
        for drafter in without if self.costs.known else ():
            if drafter.predictor and wants(drafter, drafter.predictor):
                position, tokens = drafter.predicted
                # Tokens that nobody drew may have been appended since the prediction.
                drafter.put(drafter.predictor, tokens if position == len(drafter.known) else [])
        return read_prompts

    def verified(self, drafter: Drafter, drafted: int, accepted: int) -> None:
        """Count a computed draft of `drafted` tokens, of which the first `accepted` were right."""
        method = drafter.method
        self.counters.count(method, drafted, accepted)
        share = self._shares.get(method, expected_share(method))
        right = accepted / min(drafted, accepted + 1)
        self._shares[method] = share + _NEWEST * (right - share)
        drafter.verified(drafted, accepted)

    def suspend(self, drafter: Drafter) -> None:
        """The answer has lost its place in the batch: nothing large is kept for it meanwhile."""
        if self._model is not None and (view := drafter.views.get(self._model.name)) is not None:
            self._model.end(view)

    def close(self) -> None:
        """Give back what drafts have taken for themselves."""
        if self._model is not None:
            self._model.close()

    def end(self, drafter: Drafter) -> None:
        """Tell the proposers that an answer has ended."""
        drafter.draft = ()
        for proposer in self.proposers:
            view = drafter.views.pop(proposer.name, None)
            if view is not None:
                proposer.end(view)


def _view(drafter: Drafter, name: str) -> AnswerView:
    if name not in drafter.views:
        drafter.views[name] = AnswerView(drafter)
    return drafter.views[name]
