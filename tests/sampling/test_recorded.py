"""Draws whose options the device holds are the draws of `SamplingState`."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from asyncinfer.kernels.noise import key_rows, row_keys, seed_bits
from asyncinfer.params import SamplingParams
from asyncinfer.sampling import (
    OPTION_WORDS,
    Draws,
    RecordedSampler,
    SamplingState,
    TokenHistory,
    option_words,
)
from asyncinfer.scheduler import Join

VOCAB = 400
#: Per slot; the last of them cannot be recorded.
OPTIONS: list[dict[str, Any]] = [
    {"temperature": 0.0},
    {"temperature": 1.0, "seed": 5},
    {"temperature": 0.6},
    {"temperature": 1e-8},
    {"temperature": 2.5},
    {"temperature": 1.0, "top_p": 0.5},
]
SEEDS = [0, 2**64 - 1, 7, 1 << 63, 12345678901234567890, 3]


def test_keys_on_the_device_are_the_hosts() -> None:
    seeds = np.array(SEEDS, np.uint64)
    positions = np.array([0, 1, 2**31, 77, 131_072, 9])
    bits = torch.from_numpy(np.array([seed_bits(seed) for seed in SEEDS]).view(np.int64))
    keys = key_rows(bits, torch.from_numpy(positions))
    assert keys.dtype is torch.int32
    assert keys.numpy().tolist() == row_keys(seeds, positions).tolist()


def taken(words: Any, slots: Any) -> tuple[torch.Tensor, torch.Tensor]:
    """The slots' options word by word, and their seeds, as a recorded step has them."""
    chosen = words[slots]
    options = torch.from_numpy(chosen[:, :-2].T.copy())
    return options, torch.from_numpy(chosen[:, -2:].copy().view(np.int64)[:, 0])


@pytest.mark.parametrize(
    ("slots", "draws"),
    [
        ([0, 3, 0], Draws.GREEDY),
        ([1], Draws.TEMPERATURE),
        ([4, 0, 2, 1, 3, 2, 2], Draws.TEMPERATURE),
        ([0, 5], Draws.LOGITS),
    ],
    ids=str,
)
@pytest.mark.parametrize("entries", [2**24, 3 * VOCAB])
def test_the_same_tokens(
    slots: list[int], draws: Draws, entries: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("asyncinfer.sampling.recorded.MOST_ENTRIES", entries)
    cpu = torch.device("cpu")
    state = SamplingState(len(OPTIONS), VOCAB, TokenHistory(len(OPTIONS), cpu))
    words = np.zeros((len(OPTIONS), OPTION_WORDS), np.int32)
    for slot, (options, seed) in enumerate(zip(OPTIONS, SEEDS, strict=True)):
        params = SamplingParams(**options)
        state.join(slot, Join(slot, [1], 1, [], params, seed))
        words[slot] = option_words(params, seed)
    assert Draws.serving(state.uses(np.array(slots))) is draws
    if draws is Draws.LOGITS:
        return
    sampler = RecordedSampler(VOCAB, cpu)
    options, seeds = taken(words, slots)
    for position in range(40):
        numbers = torch.Generator().manual_seed(position)
        logits = torch.randn(len(slots), VOCAB, generator=numbers) * 3
        positions = np.arange(position, position + len(slots))
        expected = state.sample(logits.clone(), np.array(slots), positions)
        tokens, peak = sampler(logits, options, seeds, torch.from_numpy(positions), draws)
        assert tokens.tolist() == expected.tokens.tolist()
        assert peak.tolist() == expected.peak.tolist()


def test_fused_draws_have_filters() -> None:
    cpu = torch.device("cpu")
    options: list[dict[str, Any]] = [
        *OPTIONS,
        {"top_k": 3},
        {"top_k": 40, "top_p": 0.9, "temperature": 1.2},
        {"min_p": 0.1},
    ]
    slots = np.arange(len(options))
    state = SamplingState(len(options), VOCAB, TokenHistory(len(options), cpu))
    words = np.zeros((len(options), OPTION_WORDS), np.int32)
    for slot, option in enumerate(options):
        params = SamplingParams(**option)
        state.join(slot, Join(slot, [1], 1, [], params, slot**9))
        words[slot] = option_words(params, slot**9)
    assert Draws.serving(state.uses(slots), fused=True) is Draws.TEMPERATURE
    sampler = RecordedSampler(VOCAB, cpu, fused=True)
    row_options, seeds = taken(words, slots)
    for position in range(20):
        numbers = torch.Generator().manual_seed(position)
        logits = torch.randn(len(slots), VOCAB, generator=numbers) * 3
        positions = np.full(len(slots), position)
        expected = state.sample(logits.clone(), slots, positions)
        there = torch.from_numpy(positions)
        tokens, peak = sampler(logits, row_options, seeds, there, Draws.TEMPERATURE)
        assert tokens.tolist() == expected.tokens.tolist()
        assert peak.tolist() == expected.peak.tolist()
        best, _ = sampler(logits, row_options, seeds, there, Draws.GREEDY)
        assert best.tolist() == logits.argmax(dim=-1).tolist()
