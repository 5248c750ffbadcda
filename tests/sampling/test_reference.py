"""The fast chain draws what its plain twin draws, whatever the options and logits."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import numpy as np
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from sampling import reference

from asyncinfer.params import SamplingParams

vocabularies = st.sampled_from([1, 2, 3, 17, 64, 257, 300])
fractions = st.one_of(st.just(1.0), st.floats(0.01, 1.0))


@st.composite
def logit_rows(draw: st.DrawFn, vocab: int) -> list[float]:
    """From all equal to far apart, with ties, some -inf."""
    numbers = np.random.default_rng(draw(st.integers(0, 2**32)))
    kind = draw(st.sampled_from(["flat", "ties", "normal", "wide", "holes"]))
    if kind == "flat":
        row = np.zeros(vocab)
    elif kind == "ties":
        row = numbers.integers(-3, 3, vocab).astype(float)
    else:
        row = numbers.normal(size=vocab) * {"normal": 2, "wide": 2000, "holes": 3}[kind]
    if kind == "holes":
        row[numbers.random(vocab) < 0.3] = -np.inf
        row[numbers.integers(vocab)] = 1.0
    return [float(x) for x in row.astype(np.float32)]


@st.composite
def requests(draw: st.DrawFn, vocab: int) -> dict[str, Any]:
    token = st.integers(0, vocab - 1)
    some = st.lists(token, max_size=8)
    options: dict[str, Any] = {
        "temperature": draw(st.sampled_from([0.0, 1e-7, 0.05, 0.7, 1.0, 1.0, 3.0])),
        "top_k": draw(st.sampled_from([0, 0, 1, 2, 5, 50, 10_000])),
        "top_p": draw(fractions),
        "min_p": draw(st.one_of(st.just(0.0), st.floats(0, 1))),
        "typical_p": draw(st.one_of(st.just(1.0), st.just(1.0), fractions)),
        "repetition_penalty": draw(st.sampled_from([1.0, 1.0, 1.3, 0.5])),
        "presence_penalty": draw(st.sampled_from([0.0, 0.0, 0.7, -1.0])),
        "frequency_penalty": draw(st.sampled_from([0.0, 0.0, 0.3, -0.2])),
        "logit_bias": draw(st.dictionaries(token, st.floats(-10, 10, width=16), max_size=4)),
        "min_tokens": draw(st.sampled_from([0, 0, 3])),
    }
    if draw(st.booleans()):
        options["allowed_token_ids"] = draw(st.lists(token, min_size=1, max_size=10))
    words = st.lists(token, min_size=1, max_size=3).map(tuple)
    return options | {
        "prompt": draw(st.lists(token, min_size=1, max_size=8)),
        "answer": draw(some),
        "stop_ids": draw(st.lists(token, max_size=2)),
        "bad_ids": draw(st.lists(words, max_size=3)),
        "seed": draw(st.integers(0, 2**64 - 1)),
    }


def kept(logits: list[float], params: SamplingParams) -> set[int]:
    """Tokens that can be drawn at all: below 1e-30 they weigh nothing in float32."""
    return {t for t, p in enumerate(reference.probabilities(logits, params)) if p > 1e-30}


def clear_cut(logits: list[float], params: SamplingParams) -> bool:
    """Whether rounding cannot decide which tokens are kept."""
    distribution = kept(logits, params)
    for name in ("top_p", "min_p", "typical_p", "temperature"):
        value = getattr(params, name)
        if value == 1 and name in ("top_p", "typical_p"):
            continue  # off
        for nudged in (value * (1 - 1e-5), value * (1 + 1e-5)):
            if nudged > 1 and name != "temperature":
                continue
            if distribution != kept(logits, dataclasses.replace(params, **{name: nudged})):
                return False
    return True


@settings(max_examples=150, deadline=None)
@given(data=st.data())
def test_the_chain_draws_what_its_twin_draws(bench: Any, data: st.DataObject) -> None:
    vocab = data.draw(vocabularies)
    rows = 5
    sampling = bench(vocab, rows)
    batch, twins = [], []
    for slot in range(rows):
        logits, asked = data.draw(logit_rows(vocab)), data.draw(requests(vocab))
        params = sampling.put(slot, **asked)
        changed = reference.changed_logits(
            logits,
            params,
            asked["prompt"],
            asked["answer"],
            stop_ids=asked["stop_ids"],
            bad_ids=asked["bad_ids"],
        )
        batch.append(logits)
        twins.append((changed, params, asked["seed"], len(asked["prompt"]) + len(asked["answer"])))
    drawn = sampling.draw(batch, range(rows))
    compared = 0
    for token, (changed, params, seed, position) in zip(drawn, twins, strict=True):
        if max(changed) == -math.inf:
            continue
        best = sorted(changed)[-2:]
        if params.greedy:
            # A penalty may round two logits into a tie.
            if len(best) == 1 or best[0] == best[1] or best[1] - best[0] > 1e-5 * abs(best[1]):
                assert token == changed.index(best[-1])
                compared += 1
            continue
        if not clear_cut(changed, params):
            continue
        probs = reference.probabilities(changed, params)
        race = sorted(
            reference.exponential(seed, position, t) / p for t, p in enumerate(probs) if p
        )
        if len(race) == 1 or race[1] > race[0] * 1.01:
            assert token == reference.draw(probs, seed, position)
            compared += 1
    assume(compared)
