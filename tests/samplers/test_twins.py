"""Each built-in sampler, and lists of them, against plain-Python twins of their definitions, token
by token: by the engine's own random numbers, the same probabilities give the same token."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch
from samplers.twins import TEMPERATURE, softmax, twin
from sampling import reference
from scipy.stats import chisquare

from asyncinfer.kernels.noise import row_uniforms
from asyncinfer.protocols import Sampler, SamplerPlugin, SamplerStep
from asyncinfer.samplers import DRY, XTC, DynamicTemperature, Mirostat, TopNSigma
from asyncinfer.testing.sampler_bench import SamplerBench

VOCAB = 23
STEPS = 60
PROMPT = [1, 2, 3, 1, 2, 4, 1, 2, 3]

CASES: list[Any] = [
    Mirostat(tau=2.0, eta=0.3),
    Mirostat(tau=3.5, eta=0.05),
    XTC(threshold=0.1, probability=0.5),
    XTC(threshold=0.02, probability=1.0),
    TopNSigma(n=1.0),
    TopNSigma(n=0.2),
    DynamicTemperature(low=0.3, high=2.0),
    DynamicTemperature(low=0.1, high=0.9, exponent=3.0),
    DRY(multiplier=2.0, allowed_length=1),
    DRY(multiplier=0.8, base=1.5, window=12),
    DRY(multiplier=9.0, allowed_length=1, breakers=(2, 5)),
]
#: In this order for one request.
COMPOSED: list[tuple[Any, ...]] = [
    (DRY(multiplier=2.0, allowed_length=1), TopNSigma(n=1.0)),
    (TopNSigma(n=1.0), DRY(multiplier=2.0, allowed_length=1)),
    (DRY(multiplier=2.0, allowed_length=1), XTC(threshold=0.1, probability=0.5)),
    (
        TopNSigma(n=1.5),
        DynamicTemperature(low=0.3, high=2.0),
        DRY(multiplier=2.0, allowed_length=1),
        Mirostat(tau=2.0, eta=0.3),
    ),
]


def named(value: object) -> str:
    if isinstance(value, tuple) and len(value) > 1:
        return ", ".join(type(each).__name__ for each in value)
    return str(value)[:60]


@pytest.mark.parametrize("samplers", [(each,) for each in CASES] + COMPOSED, ids=named)
def test_token_by_token(samplers: tuple[Any, ...]) -> None:
    numbers = np.random.default_rng(8)
    bench = SamplerBench(VOCAB, 4)
    slots = [2, 0, 3]
    known = {slot: [*PROMPT, slot] for slot in slots}
    memories: dict[int, dict[str, float]] = {slot: {} for slot in slots}
    for slot in slots:
        bench.join(slot, samplers, tokens=known[slot], seed=slot, temperature=TEMPERATURE)
    plain = changed = 0
    for _ in range(STEPS):
        # Five tokens are likely: the text repeats itself.
        logits = numbers.normal(size=(3, VOCAB)).astype(np.float32)
        logits[:, :5] += 3
        drawn = bench.draw(logits, slots)
        for slot, row, token in zip(slots, logits.tolist(), drawn, strict=True):
            position = len(known[slot])
            probs = twin(samplers, row, known[slot], slot, memories[slot])
            assert token == reference.draw(probs, slot, position)
            without = softmax(row, TEMPERATURE)
            changed += max(abs(a - b) for a, b in zip(probs, without, strict=True)) > 1e-6
            plain += token == reference.draw(without, slot, position)
            known[slot].append(token)
    # The sampler did something, or nothing was tested.
    assert changed > STEPS / 6
    assert plain < 3 * STEPS


@pytest.mark.parametrize("sampler", CASES[2:8:2], ids=named)
def test_distribution(sampler: Any) -> None:
    rows = 6000
    logits = np.random.default_rng(4).normal(size=VOCAB).astype(np.float32) * 2
    bench = SamplerBench(VOCAB, rows)
    seeds = np.random.default_rng(5).integers(0, 2**63, rows).tolist()
    for slot, seed in enumerate(seeds):
        bench.join(slot, sampler, seed=seed, temperature=TEMPERATURE)
    counts = np.bincount(bench.draw(np.tile(logits, (rows, 1)), range(rows)), minlength=VOCAB)
    expected = np.zeros(VOCAB)
    if isinstance(sampler, XTC):
        always = XTC(threshold=sampler.threshold, probability=1.0)
        never = XTC(threshold=sampler.threshold, probability=0.0)
        for sampler_params, share in (
            (always, sampler.probability),
            (never, 1 - sampler.probability),
        ):
            expected += share * np.array(twin([sampler_params], logits.tolist(), [0], 0, {}))
    else:
        expected += twin([sampler], logits.tolist(), [0], 0, {})
    assert not counts[expected == 0].any()
    often = expected * rows >= 5
    observed = [*counts[often], counts[~often].sum()]
    wanted = [*(expected[often] * rows), expected[~often].sum() * rows]
    if not wanted[-1]:
        del observed[-1], wanted[-1]
    assert chisquare(observed, wanted).pvalue > 1e-4


def test_mirostat_steers_the_surprise() -> None:
    numbers = np.random.default_rng(1)
    means = []
    for tau in (1.5, 2.0, 2.5, 3.0):
        bench = SamplerBench(200, 1)
        bench.join(0, Mirostat(tau=tau, eta=0.1))
        surprises = []
        for _ in range(400):
            logits = numbers.normal(size=200) * 3
            (token,) = bench.draw([logits], [0])
            surprises.append(-math.log2(softmax(logits.tolist())[token]))
        means.append(sum(surprises[100:]) / 300)
    assert means == pytest.approx([1.5, 2.0, 2.5, 3.0], abs=0.1)


def test_xtc_after_the_truncation_of_the_request() -> None:
    """What min-p cuts stays cut when the top choices go, as in the original's order."""
    bench = SamplerBench(4, 1)
    bench.join(0, XTC(threshold=0.2, probability=1.0), min_p=0.3)
    drawn = [bench.draw([[2.0, 1.9, 1.0, 0.5]], [0])[0] for _ in range(40)]
    assert set(drawn) == {1, 2}


def test_uniform_numbers_are_uniform_and_apart() -> None:
    seeds, positions = np.full(20_000, 7, np.uint64), np.arange(20_000)
    first, second = (row_uniforms(seeds, positions, stream) for stream in (0, 1))
    for numbers in (first, second, (first + second) % 1):
        counts, _ = np.histogram(numbers, bins=20, range=(0, 1))
        assert chisquare(counts).pvalue > 1e-4
    assert abs(np.corrcoef(first, second)[0, 1]) < 0.03
    assert abs(np.corrcoef(first[:-1], first[1:])[0, 1]) < 0.03


def test_what_is_barred_or_cut_has_no_weight() -> None:
    """A plugin may give weight anew to all that has any."""
    seen: list[list[float]] = []

    class Looks(Sampler):
        def join(self, slot: int, params: Any) -> None: ...

        def sample(self, step: SamplerStep) -> torch.Tensor:
            seen.extend(step.weights().tolist())
            return step.draw((step.weights() > 0).float())

    @dataclass(frozen=True)
    class Flat(SamplerPlugin):
        def open(self, slots: int, vocab_size: int, device: torch.device) -> Sampler:
            return Looks()

    bench = SamplerBench(5, 3)
    bench.join(0, Flat(), allowed_token_ids=[1, 2])
    bench.join(1, Flat(), top_k=3, temperature=2.0)
    bench.join(2, Flat(), temperature=0.0)
    bench.draw([[4.0, 2.0, 1.0, 0.0, -200.0]] * 3, [0, 1, 2])
    wanted = [
        [0, 1, math.exp(-1), 0, 0],
        [1, math.exp(-1), math.exp(-1.5), 0, 0],
        [1, 0, 0, 0, 0],
    ]
    assert seen == [pytest.approx(row) for row in wanted]
