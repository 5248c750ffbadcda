"""Each built-in sampler against a plain-Python twin of its definition, token by token: by the
engine's own random numbers, the same probabilities give the same token."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch
from scipy.stats import chisquare

from asyncinfer.params import SamplingParams
from asyncinfer.protocols import Sampler, SamplerPlugin, SamplerStep
from asyncinfer.samplers import DRY, XTC, DynamicTemperature, Mirostat, TopNSigma
from asyncinfer.sampling import reference
from asyncinfer.sampling.noise import row_uniforms
from asyncinfer.testing.sampler_bench import SamplerBench

VOCAB = 23
STEPS = 60
PROMPT = [1, 2, 3, 1, 2, 4, 1, 2, 3]

#: Probabilities of the next token: the sampler, the model's logits, what is known, the seed, the
#: twin's own memory.
Twin = Callable[[Any, list[float], list[int], int, dict[str, float]], list[float]]


def softmax(logits: Sequence[float], temperature: float = 1.0) -> list[float]:
    return reference.probabilities(logits, SamplingParams(temperature=temperature))


def cut(probs: Sequence[float], keep: Callable[[float], bool]) -> list[float]:
    kept = [p if keep(p) else 0.0 for p in probs]
    return [p / math.fsum(kept) for p in kept]


def mirostat(
    its: Mirostat, logits: list[float], known: list[int], seed: int, memory: dict[str, float]
) -> list[float]:
    probs = softmax(logits, 1.3)
    if "before" in memory:
        surprise = -math.log2(memory["before"])
        memory["mu"] -= its.eta * (surprise - its.tau)
    mu = memory.setdefault("mu", 2 * its.tau)
    best = max(probs)
    kept = cut(probs, lambda p: p == best or -math.log2(p) <= mu)
    memory["before"] = probs[reference.draw(kept, seed, len(known))]
    return kept


def xtc(
    its: XTC, logits: list[float], known: list[int], seed: int, memory: dict[str, float]
) -> list[float]:
    probs = softmax(logits, 1.3)
    chance = row_uniforms(np.array([seed], np.uint64), np.array([len(known)]), 0)[0]
    likely = sorted(p for p in probs if p >= its.threshold)
    if chance >= its.probability or len(likely) < 2:
        return probs
    return cut(probs, lambda p: p <= likely[0])


def top_n_sigma(
    its: TopNSigma, logits: list[float], known: list[int], seed: int, memory: dict[str, float]
) -> list[float]:
    mean = math.fsum(logits) / len(logits)
    sigma = math.sqrt(math.fsum((x - mean) ** 2 for x in logits) / len(logits))
    low = max(logits) - its.n * sigma
    return softmax([x if x >= low else -math.inf for x in logits], 1.3)


def dynamic_temperature(
    its: DynamicTemperature,
    logits: list[float],
    known: list[int],
    seed: int,
    memory: dict[str, float],
) -> list[float]:
    entropy = -math.fsum(p * math.log(p) for p in softmax(logits))
    share = (entropy / math.log(len(logits))) ** its.exponent
    return softmax(logits, 1.3 * (its.low + (its.high - its.low) * share))


def dry(
    its: DRY, logits: list[float], known: list[int], seed: int, memory: dict[str, float]
) -> list[float]:
    text = known[-its.window :]
    lengths: dict[int, int] = {}
    for end in range(1, len(text)):
        # The tokens before `end`, and the last ones.
        length = 0
        while length < end and text[end - 1 - length] == text[-1 - length]:
            if text[-1 - length] in its.breakers:
                break
            length += 1
        lengths[text[end]] = max(lengths.get(text[end], 0), min(length, 48))
    out = list(logits)
    for token, length in lengths.items():
        if length >= its.allowed_length and token not in its.breakers:
            out[token] -= its.multiplier * its.base ** (length - its.allowed_length)
    return softmax(out, 1.3)


CASES: list[tuple[Any, Twin]] = [
    (Mirostat(tau=2.0, eta=0.3), mirostat),
    (Mirostat(tau=3.5, eta=0.05), mirostat),
    (XTC(threshold=0.1, probability=0.5), xtc),
    (XTC(threshold=0.02, probability=1.0), xtc),
    (TopNSigma(n=1.0), top_n_sigma),
    (TopNSigma(n=0.2), top_n_sigma),
    (DynamicTemperature(low=0.3, high=2.0), dynamic_temperature),
    (DynamicTemperature(low=0.1, high=0.9, exponent=3.0), dynamic_temperature),
    (DRY(multiplier=2.0, allowed_length=1), dry),
    (DRY(multiplier=0.8, base=1.5, window=12), dry),
    (DRY(multiplier=9.0, allowed_length=1, breakers=(2, 5)), dry),
]


def named(value: object) -> str:
    return str(getattr(value, "__name__", value))[:60]


@pytest.mark.parametrize(("sampler", "twin"), CASES, ids=named)
def test_token_by_token(sampler: Any, twin: Twin) -> None:
    numbers = np.random.default_rng(8)
    bench = SamplerBench(VOCAB, 4)
    slots = [2, 0, 3]
    known = {slot: [*PROMPT, slot] for slot in slots}
    memories: dict[int, dict[str, float]] = {slot: {} for slot in slots}
    for slot in slots:
        bench.join(slot, sampler, tokens=known[slot], seed=slot, temperature=1.3)
    plain = changed = 0
    for _ in range(STEPS):
        # Five tokens are likely: the text repeats itself.
        logits = numbers.normal(size=(3, VOCAB)).astype(np.float32)
        logits[:, :5] += 3
        drawn = bench.draw(logits, slots)
        for slot, row, token in zip(slots, logits.tolist(), drawn, strict=True):
            position = len(known[slot])
            probs = twin(sampler, row, known[slot], slot, memories[slot])
            assert token == reference.draw(probs, slot, position)
            without = softmax(row, 1.3)
            changed += max(abs(a - b) for a, b in zip(probs, without, strict=True)) > 1e-6
            plain += token == reference.draw(without, slot, position)
            known[slot].append(token)
    # The sampler did something, or nothing was tested.
    assert changed > STEPS / 6
    assert plain < 3 * STEPS


@pytest.mark.parametrize(("sampler", "twin"), CASES[2:8:2], ids=named)
def test_distribution(sampler: Any, twin: Twin) -> None:
    rows = 6000
    logits = np.random.default_rng(4).normal(size=VOCAB).astype(np.float32) * 2
    bench = SamplerBench(VOCAB, rows)
    seeds = np.random.default_rng(5).integers(0, 2**63, rows).tolist()
    for slot, seed in enumerate(seeds):
        bench.join(slot, sampler, seed=seed, temperature=1.3)
    counts = np.bincount(bench.draw(np.tile(logits, (rows, 1)), range(rows)), minlength=VOCAB)
    expected = np.zeros(VOCAB)
    if isinstance(sampler, XTC):
        always = XTC(threshold=sampler.threshold, probability=1.0)
        never = XTC(threshold=sampler.threshold, probability=0.0)
        for its, share in ((always, sampler.probability), (never, 1 - sampler.probability)):
            expected += share * np.array(twin(its, logits.tolist(), [0], 0, {}))
    else:
        expected += twin(sampler, logits.tolist(), [0], 0, {})
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
