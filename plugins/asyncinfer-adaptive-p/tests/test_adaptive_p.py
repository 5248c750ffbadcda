"""The sampler keeps the rules, does what it says, and works by its name."""

from __future__ import annotations

import asyncio
from typing import Any

import numpy as np
import pytest
from asyncinfer_adaptive_p import AdaptiveP

from asyncinfer import Engine, InvalidRequest
from asyncinfer.plugins import samplers
from asyncinfer.testing import check_sampler
from asyncinfer.testing.sampler_bench import SamplerBench


@pytest.mark.parametrize("sampler", [AdaptiveP(), AdaptiveP(target=0.1, decay=0.5)], ids=str)
def test_it_keeps_the_rules(sampler: AdaptiveP) -> None:
    check_sampler(sampler)


def test_the_average_probability_follows_the_target() -> None:
    numbers = np.random.default_rng(2)
    means = []
    for target in (0.2, 0.35, 0.5):
        bench = SamplerBench(50, 1)
        bench.join(0, AdaptiveP(target=target), min_p=0.02)
        seen = []
        for _ in range(400):
            probs = np.exp(numbers.normal(size=50) * 2)
            probs[probs < 0.02 * probs.max()] = 0
            probs /= probs.sum()
            with np.errstate(divide="ignore"):
                (token,) = bench.draw([np.log(probs)], [0])
            seen.append(probs[token])
        means.append(float(np.mean(seen)))
    assert means == sorted(means)
    # What it aims at is not always to be had, so the mean follows from some way off.
    assert means[2] - means[0] > 0.15


def test_its_parameters_are_checked() -> None:
    with pytest.raises(InvalidRequest, match="target=2"):
        AdaptiveP(target=2)


def test_it_works_by_its_name() -> None:
    assert "adaptive-p" in samplers.names()
    options: dict[str, Any] = {"max_tokens": 12, "temperature": 1.0, "min_p": 0.05, "seed": 4}

    async def main() -> None:
        async with Engine(device="cpu", kv_bytes=1 << 26) as engine:
            named = {"sampler": "adaptive-p", "sampler_args": {"target": 0.3}}
            first = await engine.generate("def add(a, b):", **options, **named)
            both = await asyncio.gather(
                engine.generate("def add(a, b):", **options, sampler=AdaptiveP(target=0.3)),
                engine.generate("import ", **options, **named),
            )
            assert both[0].token_ids == first.token_ids

    asyncio.run(main())
