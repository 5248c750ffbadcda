"""The tokens after a beam that a group never looks at are none that it would choose."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from random import Random

from hypothesis import given, settings
from hypothesis import strategies as st

from asyncinfer.chunk import TokenLogprob
from asyncinfer.engine.beam_group import BeamGroup, BeamOptions, Candidate
from asyncinfer.scheduler import RowLogprobs


@settings(derandomize=True, deadline=None)
@given(st.lists(st.sampled_from((-0.5, -1.0, -3.0)), max_size=9))
def test_alternatives_come_one_by_one_in_their_order(logprobs: list[float]) -> None:
    ranked = sorted(logprobs, reverse=True)
    top = tuple((7 * place % 10, logprob) for place, logprob in enumerate(ranked))
    packed = RowLogprobs.of([TokenLogprob(3, -1.0, 2, top), TokenLogprob(4, -1.0, 2, top)])
    assert (*packed.best(),) == next(iter(packed)).top


@settings(derandomize=True, deadline=None)
@given(st.integers(0, 2**32), st.booleans())
def test_what_is_not_looked_at_is_never_chosen(seed: int, grouped: bool) -> None:
    """Groups choose among what a beam gives as they would among all tokens."""
    rng = Random(seed)
    options = BeamOptions(4, 1.0, False, *((2, rng.choice((0.5, 3.0))) if grouped else ()))
    stops, most = rng.randrange(4), options.candidates(0)
    groups = [[BeamGroup(options, stops, 9) for _ in range(options.groups)] for _ in range(2)]
    for _ in range(4):
        taken: tuple[Counter[int], Counter[int]] = (Counter(), Counter())
        for whole, cut in zip(*groups, strict=True):
            if whole.over:
                continue
            offered = [_following(rng, stops, options.candidates(stops)) for _ in whole.beams]
            kept = [[*_first(each, most)] for each in offered]
            assert whole.advance(offered, taken[0]) == cut.advance(kept, taken[1])
            assert whole.hypotheses == cut.hypotheses


def _following(rng: Random, stops: int, count: int) -> list[Candidate]:
    """Tokens that may follow, the likeliest first, equals by their ids; those below `stops` end a
    text."""
    tokens = rng.sample(range(60), count)
    found = [(rng.choice((-1.0, -2.0, -rng.random() * 9)), token) for token in tokens]
    found.sort(key=lambda each: (-each[0], each[1]))
    return [(token, logprob, "stop" if token < stops else None) for logprob, token in found]


def _first(following: list[Candidate], most: int) -> Iterator[Candidate]:
    """Those up to the last of `most` that end no text."""
    for candidate in following:
        yield candidate
        most -= candidate[2] != "stop"
        if not most:
            return
