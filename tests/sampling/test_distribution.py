"""Chi-square of many draws against the closed form, for every option and combinations."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from sampling import reference
from scipy import stats

from asyncinfer.params import SamplingParams

VOCAB = 41
DRAWS = 200_000
#: With ties, one of them at the top, and a tail that is hardly ever drawn.
LOGITS = np.round(np.random.default_rng(7).normal(size=VOCAB) * 2, 1)

PLAIN: list[dict[str, Any]] = [
    {},
    {"temperature": 0.5},
    {"temperature": 2.5},
    {"top_k": 1},
    {"top_k": 7},
    {"top_k": 1000},
    {"top_p": 0.1},
    {"top_p": 0.8},
    {"top_p": 0.999},
    {"min_p": 0.05},
    {"min_p": 1.0},
    {"typical_p": 0.3},
    {"typical_p": 0.9},
    {"logit_bias": {3: 2.5, 11: -50.0}},
    {"allowed_token_ids": [1, 2, 30]},
    {"temperature": 0.7, "top_k": 20, "top_p": 0.9},
    {"temperature": 1.3, "top_k": 12, "top_p": 0.7, "min_p": 0.1},
    {"temperature": 1.5, "top_p": 0.95, "typical_p": 0.8},
    {"top_k": 15, "top_p": 0.95, "min_p": 0.02, "typical_p": 0.7, "logit_bias": {5: 1.0}},
]


def check(drawn: list[int], probs: list[float]) -> None:
    seen, expected = np.bincount(drawn, minlength=VOCAB), np.array(probs) * len(drawn)
    assert not seen[expected == 0].any(), "a token was drawn that the filters cut"
    # Cells with few expected draws are counted as one.
    rare = expected < 8
    seen = np.append(seen[~rare], seen[rare].sum())
    expected = np.append(expected[~rare], expected[rare].sum())
    kept = expected > 0
    if kept.sum() > 1:
        assert stats.chisquare(seen[kept], expected[kept]).pvalue > 1e-4


@pytest.mark.parametrize("options", PLAIN, ids=str)
def test_draws_follow_the_closed_form(options: dict[str, Any], bench: Any) -> None:
    sampling = bench(VOCAB)
    params = sampling.put(0, seed=99, **options)
    rows = np.broadcast_to(LOGITS, (DRAWS // 4, VOCAB))
    drawn: list[int] = []
    for first in range(1, DRAWS, len(rows)):
        drawn += sampling.draw(rows, [0] * len(rows), np.arange(first, first + len(rows)))
    changed = reference.changed_logits(LOGITS.tolist(), params, [0], [])
    check(drawn, reference.probabilities(changed, params))


@pytest.mark.parametrize(
    "options",
    [
        {"repetition_penalty": 1.7},
        {"presence_penalty": 1.2},
        {"frequency_penalty": 0.6},
        {"frequency_penalty": -0.4},
        {"repetition_penalty": 0.8, "presence_penalty": 0.5, "frequency_penalty": 0.3},
        {"min_tokens": 9, "stop_ids": [2, 3]},
        {"bad_ids": [(4,), (9, 9, 1), (2, 9, 2), (40, 5)]},
        {"temperature": 0.8, "top_p": 0.9, "repetition_penalty": 1.2, "min_tokens": 9,
         "stop_ids": [2], "bad_ids": [(9, 7)], "logit_bias": {1: 1.0}},
    ],
    ids=str,
)  # fmt: skip
def test_draws_after_a_history_follow_the_closed_form(options: dict[str, Any], bench: Any) -> None:
    slots = 4_000
    sampling = bench(VOCAB, slots)
    prompt, answer = [5, 6, 6, 2], [1, 9, 1, 1, 30, 2, 9]
    for slot in range(slots):
        params = sampling.put(slot, seed=slot, prompt=prompt, answer=answer, **options)
    assert isinstance(params, SamplingParams)
    drawn = sampling.draw(np.broadcast_to(LOGITS, (slots, VOCAB)), range(slots))
    changed = reference.changed_logits(
        LOGITS.tolist(),
        params,
        prompt,
        answer,
        stop_ids=options.get("stop_ids", ()),
        bad_ids=options.get("bad_ids", ()),
    )
    check(drawn, reference.probabilities(changed, params))
