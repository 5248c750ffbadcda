"""Rows sampled one by one get what they get together."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

from asyncinfer.sampling import sample_per_row, score_per_row, score_tokens

VOCAB = 50


def test_sampling_row_by_row(bench: Callable[..., Any]) -> None:
    sampling = bench(VOCAB, 5)
    sampling.put(0, temperature=0.0)
    sampling.put(1, temperature=1.0, seed=3, logprobs=0)
    sampling.put(2, temperature=0.5, top_p=0.8, seed=4, logprobs=3)
    sampling.put(3, temperature=0.0, logprobs=5, frequency_penalty=1.0, answer=[7, 7])
    sampling.put(4, temperature=2.0, seed=9)
    logits = torch.randn(5, VOCAB, generator=torch.Generator().manual_seed(1)) * 3
    slots = np.arange(5)
    together = sampling.state.sample(logits.clone(), slots, sampling.lengths[slots])
    apart = sample_per_row(sampling.state, logits, slots, sampling.lengths[slots])
    assert apart.tokens.tolist() == together.tokens.tolist()
    assert apart.peak.tolist() == together.peak.tolist()
    assert apart.scored_rows == together.scored_rows == {1: 0, 2: 3, 3: 5}
    for number, (one, other) in enumerate(zip(apart.scores, together.scores, strict=True)):
        assert one.dtype == other.dtype
        for row, top in enumerate(apart.scored_rows.values()):
            here = slice(top) if number > 2 else ...
            assert one[row][here].tolist() == pytest.approx(other[row][here].tolist(), abs=1e-5)


@pytest.mark.parametrize("count", [0, 1, 4])
def test_scores_row_by_row(count: int) -> None:
    logits = torch.randn(count, VOCAB, generator=torch.Generator().manual_seed(2))
    tokens = torch.arange(count)
    for one, other in zip(
        score_per_row(logits, tokens, 3), score_tokens(logits, tokens, 3), strict=True
    ):
        assert one.shape == other.shape
        torch.testing.assert_close(one, other)
