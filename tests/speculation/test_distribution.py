"""What a real model answers has the distribution that its own probabilities say, whoever drafts."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from itertools import product
from math import exp
from pathlib import Path
from typing import Any

import pytest
from models.eagle3_heads import HeadedModel, agreeing_head, random_head
from models.held import Held
from scipy.stats import chisquare
from speculation.crowd import OPTIONS, VOCAB, held

from asyncinfer.testing import InlineEngine

#: The only tokens of an answer, and a text that has each three of them in a row once.
LETTERS = [ord("a"), ord("b")]
PROMPT = list(b"aaababbbaa")
TOKENS = 5
ANSWERS = 400
TEXTS = list(product(LETTERS, repeat=TOKENS))


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Of a model."""
    return agreeing_head(VOCAB).save(tmp_path_factory.mktemp("model"))[0]


def drawn(source: Held, asked: Sequence[dict[str, Any]], **config: Any) -> Any:
    """Finished streams, and their engine. So few at once that drafts pay."""
    engine = InlineEngine(source, **OPTIONS | {"max_running": 4} | config)
    streams = [engine.submit(allowed_token_ids=LETTERS, **one) for one in asked]
    engine.run()
    for stream in streams:
        stream.read()
    return streams, engine


@pytest.fixture(scope="module")
def probabilities(folder: Path) -> list[float]:
    """Of each of `TEXTS`: the product of its tokens' probabilities among the letters."""
    befores = [before for n in range(TOKENS) for before in product(LETTERS, repeat=n)]
    asked = [
        {"prompt": [*PROMPT, *before], "max_tokens": 1, "logprob_token_ids": LETTERS}
        for before in befores
    ]
    after = {}
    for before, stream in zip(befores, drawn(held(folder), asked)[0], strict=True):
        (logprobs,) = [one for chunk in stream.chunks for one in chunk.logprobs or ()]
        weights = {token: exp(logprob) for token, logprob in logprobs.top}
        after[before] = {t: weight / sum(weights.values()) for t, weight in weights.items()}
    found = []
    for text in TEXTS:
        found.append(1.0)
        for n, token in enumerate(text):
            found[-1] *= after[text[:n]][token]
    return found


@pytest.mark.parametrize("method", ["prompt-lookup", "suffix", "prediction", "draft-model"])
def test_answers_have_the_models_distribution(
    folder: Path, tmp_path: Path, probabilities: list[float], method: str
) -> None:
    config: dict[str, Any] = {}
    asked: list[dict[str, Any]] = [
        {"prompt": PROMPT, "max_tokens": TOKENS, "seed": seed} for seed in range(ANSWERS)
    ]
    match method:
        case "draft-model":
            # Another model, which is wrong at times.
            other = HeadedModel(random_head("vllm", vocab=VOCAB), layers=2)
            config = {"draft": held(other.save(tmp_path)[0])}
        case "prediction":
            # All of one text: were it believed, that text would come too often.
            for one in asked:
                one["prediction"] = list(TEXTS[5])
        case _:
            config = {"proposers": [method]}
    streams, engine = drawn(held(folder), asked, **config)
    (drafts,) = engine.stats().drafts
    assert drafts.method == method
    assert min(sum(drafts.accepted), sum(drafts.rejected)) > 100
    counts = Counter(tuple(stream.token_ids()) for stream in streams)
    seen, expected = [0], [0.0]
    for text, probability in zip(TEXTS, probabilities, strict=True):
        if probability * ANSWERS < 8:
            # Cells with few expected draws are counted as one.
            seen[0] += counts[text]
            expected[0] += probability * ANSWERS
        else:
            seen.append(counts[text])
            expected.append(probability * ANSWERS)
    assert sum(seen) == ANSWERS
    assert len(seen) > 12
    assert chisquare(seen, expected).pvalue > 1e-4
