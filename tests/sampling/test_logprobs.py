"""Logprobs of the model's own distribution, whatever was done to the logits."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from support import Columns, columns

from asyncinfer.sampling import pack_scores, score_tokens
from asyncinfer.sampling import row_logprobs as rows_of

LOGITS = torch.tensor(np.random.default_rng(5).normal(size=(7, 300)) * 4, dtype=torch.float32)


def row_logprobs(scored: list[torch.Tensor], start: int, stop: int, top: int) -> Columns:
    return columns(rows_of(pack_scores([part.numpy() for part in scored]), start, stop, top))


def test_scores_match_float64() -> None:
    tokens = torch.tensor([0, 5, 299, 17, 17, 1, 2])
    exact = LOGITS.double().log_softmax(dim=-1)
    records = row_logprobs(score_tokens(LOGITS, tokens, 4), 0, 7, 4)
    assert records.token_ids == tokens.tolist()
    assert records.logprobs == pytest.approx(exact[torch.arange(7), tokens].tolist(), abs=1e-5)
    for row in range(7):
        ranked = exact[row].argsort(descending=True).tolist()
        assert records.ranks[row] == ranked.index(int(tokens[row])) + 1
        assert [token for token, _ in records.top[row]] == ranked[:4]
        assert [lp for _, lp in records.top[row]] == pytest.approx(
            exact[row, ranked[:4]].tolist(), abs=1e-5
        )


def test_ties_share_a_rank_and_the_lowest_id_comes_first() -> None:
    logits = torch.tensor([[0.0, 2.0, 1.0, 2.0, 2.0]])
    scored = score_tokens(logits, torch.tensor([3]), 3)
    records = row_logprobs(scored, 0, 1, 3)
    assert records.ranks == [1]
    assert [token for token, _ in records.top[0]] == [1, 3, 4]
    assert row_logprobs(score_tokens(logits, torch.tensor([2]), 9), 0, 1, 9).ranks == [4]


def test_no_more_alternatives_than_tokens_and_none_for_zero() -> None:
    scored = score_tokens(LOGITS[:2, :3], torch.tensor([0, 1]), 10)
    assert [len(top) for top in row_logprobs(scored, 0, 2, 10).top] == [3, 3]
    assert row_logprobs(scored, 0, 2, 0).top == [(), ()]


def test_a_slice_of_the_rows() -> None:
    scored = score_tokens(LOGITS, torch.arange(7), 2)
    assert row_logprobs(scored, 2, 5, 2).token_ids == [2, 3, 4]


def test_the_sampler_scores_only_who_asks_and_before_any_change(bench: Any) -> None:
    sampling = bench(300, 4)
    sampling.put(0, logprobs=2, logit_bias={7: 50.0}, temperature=0.2)
    sampling.put(1)
    sampling.put(2, temperature=0.0)
    sampling.put(3, logprobs=0, allowed_token_ids=[9], repetition_penalty=2.0, prompt=[9])
    sampled = sampling.state.sample(LOGITS[:4].clone(), np.arange(4), sampling.lengths)
    assert sampled.scored_rows == {0: 2, 3: 0}
    assert sampled.tokens[0] == 7
    assert sampled.tokens[3] == 9
    exact = LOGITS.double().log_softmax(dim=-1)
    scored = row_logprobs(sampled.scores, 0, 2, 2)
    assert scored.token_ids == [7, 9]
    assert scored.logprobs == pytest.approx([exact[0, 7].item(), exact[3, 9].item()], abs=1e-5)
