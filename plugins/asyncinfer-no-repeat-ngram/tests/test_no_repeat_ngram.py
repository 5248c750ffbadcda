"""The sampler keeps the rules, does what it says, and works by its name."""

from __future__ import annotations

import asyncio

import numpy as np
import pytest
from asyncinfer_no_repeat_ngram import NoRepeatNgram

from asyncinfer import Engine, InvalidRequest
from asyncinfer.plugins import samplers
from asyncinfer.testing import check_sampler
from asyncinfer.testing.sampler_bench import SamplerBench


@pytest.mark.parametrize("sampler", [NoRepeatNgram(2), NoRepeatNgram(3, window=6)], ids=str)
def test_it_keeps_the_rules(sampler: NoRepeatNgram) -> None:
    check_sampler(sampler)


def _barred(text: list[int], n: int, window: int) -> set[int]:
    text = text[-window:]
    return {
        text[end]
        for end in range(n - 1, len(text))
        if text[end - n + 1 : end] == text[len(text) - n + 1 :]
    }


def test_it_bars_what_completes_an_ngram_and_nothing_else() -> None:
    numbers = np.random.default_rng(3)
    cases = [(2, 4096), (3, 4096), (4, 9)]
    bench = SamplerBench(6, len(cases))
    for slot, (n, window) in enumerate(cases):
        bench.join(slot, NoRepeatNgram(n, window), tokens=[1, 2, 3, 1, 2], temperature=0.0)
    barred = 0
    for _ in range(60):
        logits = numbers.normal(size=(len(cases), 6))
        known = [bench.tokens(slot) for slot in range(len(cases))]
        for row, text, token, case in zip(
            logits, known, bench.draw(logits, range(len(cases))), cases, strict=True
        ):
            bars = _barred(text, *case)
            if len(bars) == 6:
                bars = set()
            row[list(bars)] = -np.inf
            assert token == row.argmax()
            barred += bool(bars)
    assert barred > 60


def test_its_parameters_are_checked() -> None:
    with pytest.raises(InvalidRequest, match="n=1"):
        NoRepeatNgram(n=1)


def test_it_works_by_its_name() -> None:
    assert "no-repeat-ngram" in samplers.names()

    async def main() -> None:
        async with Engine(device="cpu", kv_bytes=1 << 26) as engine:
            for n in (2, 3):
                prompt = [5, 6, 7, 8]
                done = await engine.generate(
                    prompt,
                    max_tokens=60,
                    ignore_eos=True,
                    sampler="no-repeat-ngram",
                    sampler_args={"n": n},
                )
                text = [*prompt, *done.token_ids]
                ngrams = [tuple(text[i : i + n]) for i in range(len(text) - n + 1)]
                assert len(set(ngrams)) == len(ngrams)

    asyncio.run(main())
