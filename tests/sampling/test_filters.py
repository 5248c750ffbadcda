"""What every filter keeps, set by set, against the plain twin."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from sampling import reference

from asyncinfer.params import SamplingParams
from asyncinfer.sampling import filters
from asyncinfer.sampling.filters import keep_likely, keep_typical


def kept_likely(rows: list[list[float]], options: list[dict[str, Any]]) -> list[set[int]]:
    scores = torch.tensor(rows)
    scores -= scores.amax(dim=-1, keepdim=True)
    params = [SamplingParams(**option) for option in options]
    weights = scores.exp()
    keep_likely(
        scores,
        weights,
        np.array([p.top_k for p in params]),
        np.array([p.top_p for p in params]),
        np.array([p.min_p for p in params]),
    )
    return [set(row.nonzero()[:, 0].tolist()) for row in weights]


def twin(row: list[float], **options: Any) -> set[int]:
    probs = reference.probabilities(row, SamplingParams(**options))
    return {token for token, p in enumerate(probs) if p > 0}


@pytest.mark.parametrize("vocab", [1, 5, 256, 257, 9000])
@pytest.mark.parametrize("spread", [0.0, 0.3, 4.0])
def test_any_mix_of_rows_keeps_what_each_keeps_alone(vocab: int, spread: float) -> None:
    # Flat rows need more than the first candidates; mixed rows need all of them.
    numbers = np.random.default_rng(vocab)
    options: list[dict[str, Any]] = [
        {"top_k": 3},
        {"top_p": 0.97},
        {"min_p": 0.3},
        {"top_k": 300, "top_p": 0.9},
        {"top_k": 4, "top_p": 0.77},
        {"top_k": 10, "min_p": 0.2},
        {"top_p": 0.5, "min_p": 0.01},
        {"top_p": 0.011},
        {},
    ]
    rows = (numbers.normal(size=(len(options), vocab)) * spread).astype(np.float32).tolist()
    expected = [twin(row, **option) for row, option in zip(rows, options, strict=True)]
    assert kept_likely(rows, options) == expected
    limited = [i for i, option in enumerate(options) if "top_k" in option]
    some = kept_likely([rows[i] for i in limited], [options[i] for i in limited])
    assert some == [expected[i] for i in limited]


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({"top_k": 1}, {0, 1}),
        ({"top_k": 2}, {0, 1}),
        ({"top_k": 3}, {0, 1, 2, 3, 4}),
        ({"top_k": 3, "top_p": 0.5}, {0, 1}),
        ({"top_k": 3, "top_p": 0.9}, {0, 1, 2, 3, 4}),
        ({"top_p": 0.6}, {0, 1}),
        ({"top_p": 0.78}, {0, 1, 2, 3, 4}),
        ({"top_p": 0.9999999}, set(range(6))),
        ({"min_p": 0.21}, {0, 1}),
        ({"min_p": 0.19}, {0, 1, 2, 3, 4}),
        ({"min_p": 1.0}, {0, 1}),
    ],
    ids=str,
)
def test_what_ties_with_the_last_token_kept_is_kept(
    options: dict[str, Any], expected: set[int]
) -> None:
    row = np.log([10, 10, 2, 2, 2, 0.1]).tolist()
    assert kept_likely([row], [options]) == [expected] == [twin(row, **options)]


def test_each_filter_weighs_what_the_one_before_it_left() -> None:
    # Of all the mass 60 % are the first two; of the three that top-k leaves, 75 %.
    row = np.log([0.4, 0.2, 0.2 - 1e-3, 0.1, 0.1]).tolist()
    assert kept_likely([row], [{"top_p": 0.7}]) == [{0, 1, 2}]
    assert kept_likely([row], [{"top_k": 3, "top_p": 0.7}]) == [{0, 1}]


@pytest.mark.parametrize("vocab", [1, 2, 300, 5000])
@pytest.mark.parametrize("mass", [0.01, 0.4, 0.9, 0.999])
def test_typical_keeps_what_is_nearest_to_the_entropy(vocab: int, mass: float) -> None:
    numbers = np.random.default_rng(vocab)
    scores = torch.tensor(numbers.normal(size=(4, vocab)) * 2, dtype=torch.float32)
    scores[1, vocab // 2] = -torch.inf
    scores[1, 0] = 1.0
    expected = [twin(row.tolist(), typical_p=mass) for row in scores]
    weights = scores.exp()
    keep_typical(scores.clamp(min=-80), weights, np.full(4, mass))
    assert [set(row.nonzero()[:, 0].tolist()) for row in weights] == expected


def test_bisection_finds_what_a_sort_finds() -> None:
    numbers = np.random.default_rng(3)
    order = torch.tensor(-numbers.exponential(size=(8, 3000)), dtype=torch.float32)
    order -= order.amax(dim=-1, keepdim=True)
    order[0] = order[0].round(decimals=1)
    order[1] *= 30
    order[2] *= 1e-6
    order[3, 5:] = -torch.inf
    order[4] = 0.0
    weights = order.exp()
    for share in (1e-9, 0.2, 0.5, 0.9, 0.9999, 1.0):
        goal = weights.sum(dim=-1, keepdim=True, dtype=torch.float64) * share
        ranked = order.sort(dim=-1, descending=True)
        cut, _ = filters._cross(ranked.values, weights.gather(1, ranked.indices), goal)
        # A sum in another order may reach all of the mass one token earlier or later.
        rows = slice(None) if share < 1 else slice(3, 5)
        assert torch.equal(filters._search(order, weights, goal)[rows], cut[rows])
