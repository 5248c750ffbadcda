"""`BeamGroup`: which beams go on and which are answers, as transformers decides it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Final, Literal, NamedTuple

from asyncinfer.bounds import MAX_BEAMS
from asyncinfer.checks import check_integer, check_real
from asyncinfer.errors import InvalidRequest
from asyncinfer.structured_output import CONSTRAINTS

__all__ = ["BEAM_SAMPLING", "Beam", "BeamGroup", "BeamOptions", "Candidate", "Hypothesis"]

#: The sampling options that a beam search accepts: those that restrict the answer.
BEAM_SAMPLING: Final = frozenset(
    (
        *("max_tokens", "min_tokens", "stop_token_ids", "ignore_eos", "logit_bias"),
        *("allowed_token_ids", "bad_words", "constrain_after", *CONSTRAINTS),
    )
)


@dataclass(frozen=True, slots=True)
class BeamOptions:
    """Options of a beam search. Raises `InvalidRequest`."""

    #: Beams that are kept, in all groups together.
    beams: int
    #: An answer's score is the sum of its logprobs over its number of tokens to this power.
    length_penalty: float = 1.0
    #: True ends the search with as many answers as beams; False once the best beam scores no better
    #: than the worst answer; "never" once no beam could score better.
    early_stopping: bool | Literal["never"] = False
    #: Diverse beam search (Vijayakumar et al., 2018): beams are divided into so many groups.
    groups: int = 1
    #: Subtracted from a token's logprob for each beam of an earlier group that takes it.
    diversity_penalty: float = 0.0

    def __post_init__(self) -> None:
        put = object.__setattr__
        put(self, "beams", check_integer("beams", self.beams, 1, MAX_BEAMS))
        put(self, "length_penalty", check_real("length_penalty", self.length_penalty, -10.0, 10.0))
        early: object = self.early_stopping
        if not isinstance(early, bool) and early != "never":
            raise InvalidRequest("early_stopping", early, 'must be True, False or "never"')
        put(self, "groups", check_integer("groups", self.groups, 1, self.beams))
        if self.beams % self.groups:
            raise InvalidRequest("groups", self.groups, f"must divide beams={self.beams}")
        penalty = check_real("diversity_penalty", self.diversity_penalty, 0.0, 1000.0)
        if (penalty > 0) != (self.groups > 1):
            bound = "must be > 0 with groups > 1, and 0 without"
            raise InvalidRequest("diversity_penalty", penalty, bound)
        put(self, "diversity_penalty", penalty)

    def candidates(self, stop_ids: int) -> int:
        """How many tokens to look at after each beam, if so many tokens end a text."""
        # Enough for all beams to go on even if every token that ends a text is among the likeliest,
        # and every token that an earlier group takes is penalised.
        spare = self.beams if self.groups > 1 else 0
        return max(2, 1 + stop_ids) * (self.beams // self.groups) + spare


class Beam(NamedTuple):
    """A beam that goes on: which of the group's beams it continues, and by which token."""

    parent: int
    token: int
    #: The sum of its logprobs, penalties for lack of diversity included.
    total: float


class Hypothesis(NamedTuple):
    """A finished answer."""

    score: float
    #: Without the prompt.
    tokens: tuple[int, ...]
    finish_reason: str


#: What may follow a beam: a token, its logprob, and why the answer ends with it, if it does.
Candidate = tuple[int, float, str | None]


class BeamGroup:
    """The beams of one group. It knows neither sequences nor pages.

    Args:
        options: of the whole search.
        stop_ids: how many tokens end a text.
        most: tokens of the longest answer.
    """

    def __init__(self, options: BeamOptions, stop_ids: int, most: int) -> None:
        self._options: Final = options
        self._size: Final = options.beams // options.groups
        self._width: Final = max(2, 1 + stop_ids) * self._size
        self._most: Final = most
        #: Tokens of each beam's answer so far, and the sum of their logprobs.
        self.beams: list[tuple[tuple[int, ...], float]] = [((), 0.0)]
        #: The best first.
        self.hypotheses: list[Hypothesis] = []
        self.over = False

    def advance(self, following: Sequence[Sequence[Candidate]], taken: Counter[int]) -> list[Beam]:
        """Choose the beams of the next step; none once the group is over.

        Args:
            following: for each beam what may follow it, the likeliest first.
            taken: tokens that earlier groups took in this step; those of this group are added.
        """
        options, length = self._options, len(self.beams[0][0]) + 1
        ranked = sorted(
            (
                (total + logprob - options.diversity_penalty * taken[token], parent, token, reason)
                for parent, (_, total) in enumerate(self.beams)
                for token, logprob, reason in following[parent]
            ),
            key=lambda candidate: (-candidate[0], candidate[1], candidate[2]),
        )[: self._width]
        unended = (Beam(p, token, total) for total, p, token, reason in ranked if reason != "stop")
        going = [*islice(unended, self._size)]
        # Tokens that beams chose in the last step count as well.
        taken.update(beam.token for beam in going)
        for total, parent, token, reason in ranked[: self._size]:
            if reason is not None:
                tokens = (*self.beams[parent][0], token)
                score = total / length**options.length_penalty
                self.hypotheses.append(Hypothesis(score, tokens, reason))
        self.hypotheses.sort(key=lambda each: -each.score)
        del self.hypotheses[self._size :]
        # Transformers compares answers with the best beam, in groups even one that has ended.
        best = [each[0] for each in ranked] if options.groups > 1 else [b.total for b in going]
        self.over = not going or length == self._most or not self._can_improve(best[0], length)
        if self.over:
            return []
        self.beams = [((*self.beams[b.parent][0], b.token), b.total) for b in going]
        return going

    def _can_improve(self, best: float, length: int) -> bool:
        """Whether the search goes on, given the summed logprob and the length of the best beam."""
        if len(self.hypotheses) < self._size:
            return True
        options = self._options
        if options.early_stopping is True:
            return False
        if options.early_stopping == "never" and options.length_penalty > 0:
            length = self._most
        possible: float = best / length**options.length_penalty
        return possible > self.hypotheses[-1].score
