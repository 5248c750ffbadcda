"""The fused draw is the chain's: the same tokens, peaks and logprobs, whatever rows ask for."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from asyncinfer.params import SamplingParams
from asyncinfer.sampling import SamplingState, TokenHistory
from asyncinfer.scheduler import Join

VOCAB = 301
KINDS: list[dict[str, Any]] = [
    {"temperature": 0.0},
    {},
    {"temperature": 0.6, "top_p": 0.9},
    {"top_k": 5},
    {"top_k": 10_000, "temperature": 3.0},
    {"min_p": 0.05, "temperature": 2.0},
    {"typical_p": 0.5},
    {"top_k": 50, "top_p": 0.95, "min_p": 0.02, "typical_p": 0.7},
    {"repetition_penalty": 1.5},
    {"presence_penalty": 1.0, "frequency_penalty": 0.5, "temperature": 0.0},
    {"frequency_penalty": -0.5, "top_k": 20, "top_p": 0.8},
    {"logit_bias": {1: 3.0, 2: -3.0}},
    {"allowed_token_ids": range(10, 60), "top_p": 0.99},
    {"logprobs": 3, "temperature": 0.3},
    {"logprobs": 0, "top_p": 0.5, "logit_bias": {7: 2.0}},
    {"temperature": 1e-8},
]
DEVICES = [
    "cpu",
    pytest.param(
        "cuda",
        marks=[
            pytest.mark.gpu,
            pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
        ],
    ),
]


@pytest.fixture(params=DEVICES)
def states(request: pytest.FixtureRequest) -> tuple[SamplingState, SamplingState]:
    """The chain and the fused draw, with the same requests."""
    slots, device = 2 * len(KINDS), torch.device(request.param)
    history = TokenHistory(slots, device)
    both = tuple(SamplingState(slots, VOCAB, history, fused=fused) for fused in (False, True))
    for slot in range(slots):
        numbers = np.random.default_rng(slot)
        tokens = numbers.integers(0, VOCAB, 5 + slot).tolist()
        history.join(slot, tokens)
        join = Join(slot, tokens, 4, [], SamplingParams(**KINDS[slot % len(KINDS)]), slot**9 - 1)
        for state in both:
            state.join(slot, join)
    return both


def agree(states: tuple[SamplingState, SamplingState], slots: np.ndarray, round_: int) -> None:
    chain, fused = states
    numbers = torch.Generator().manual_seed(round_)
    logits = torch.randn(len(slots), VOCAB, generator=numbers).to(chain.device) * 4
    if round_ % 3 == 0:
        logits = logits.round()
    if round_ % 5 == 0:
        logits[0, 3] = float("nan")
    one = chain.sample(logits.clone(), slots, slots + 5)
    other = fused.sample(logits.clone(), slots, slots + 5)
    torch.testing.assert_close(other.peak, one.peak, rtol=0, atol=0, equal_nan=True)
    well = one.peak.isfinite()
    assert other.tokens[well].tolist() == one.tokens[well].tolist()
    assert other.scored_rows == one.scored_rows
    for mine, theirs in zip(other.scores, one.scores, strict=True):
        scored = torch.tensor([bool(well[row]) for row in one.scored_rows])
        torch.testing.assert_close(mine[scored], theirs[scored])


def test_mixed_batches(states: tuple[SamplingState, SamplingState]) -> None:
    for round_ in range(30):
        order = np.random.default_rng(round_).permutation(2 * len(KINDS))
        agree(states, order[: 1 + round_], round_)


@pytest.mark.parametrize("kind", range(len(KINDS)), ids=lambda kind: str(KINDS[kind]))
def test_alone(states: tuple[SamplingState, SamplingState], kind: int) -> None:
    for round_ in range(1, 5):
        agree(states, np.array([kind, kind + len(KINDS)]), round_)


def test_it_is_chosen_where_it_is_a_kernel(
    states: tuple[SamplingState, SamplingState],
) -> None:
    device = states[0].device
    assert SamplingState(1, VOCAB, TokenHistory(1, device)).fused is (device.type == "cuda")
