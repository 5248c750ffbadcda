"""What a real model answers has the distribution that its own probabilities say, whoever drafts."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from itertools import product
from math import exp
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import torch
from models.eagle3_heads import HeadedModel, agreeing_head, random_head
from models.held import Held
from models.predictors import agreeing
from scipy.stats import chisquare
from speculation.crowd import OPTIONS, VOCAB, held

from asyncinfer.models import load_model
from asyncinfer.testing import InlineEngine
from asyncinfer.testing.decoder_run import DecoderRun

#: The only tokens of an answer, and a text that has each three of them in a row once.
LETTERS = [ord("a"), ord("b")]
PROMPT = list(b"aaababbbaa")
TOKENS = 5
ANSWERS = 400
TEXTS = list(product(LETTERS, repeat=TOKENS))


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """Of a model and of its EAGLE-3 head, which draws like it most of the time."""
    return agreeing_head(VOCAB).save(tmp_path_factory.mktemp("model"))


def drawn(source: Held, asked: Sequence[dict[str, Any]], **config: Any) -> Any:
    """Finished streams, and their engine. So few at once that drafts pay."""
    engine = InlineEngine(source, **OPTIONS | {"max_running": 4} | config)
    streams = [engine.submit(**one) for one in asked]
    engine.run()
    for stream in streams:
        stream.read()
    return streams, engine


@pytest.fixture(scope="module")
def probabilities(folders: tuple[Path, Path]) -> list[float]:
    return probabilities_of(folders[0])


def probabilities_of(folder: Path) -> list[float]:
    """Of each of `TEXTS`: the product of its tokens' probabilities among the letters."""
    befores = [before for n in range(TOKENS) for before in product(LETTERS, repeat=n)]
    asked = [
        {
            "prompt": [*PROMPT, *before],
            "max_tokens": 1,
            "allowed_token_ids": LETTERS,
            "logprob_token_ids": LETTERS,
        }
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
    folders: tuple[Path, Path], tmp_path: Path, probabilities: list[float], method: str
) -> None:
    config: dict[str, Any] = {}
    asked = requests()
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
    check(probabilities, drawn(held(folders[0]), asked, **config), method)


@pytest.mark.parametrize("method", ["eagle3", "mtp"])
def test_layers_that_predict(folders: tuple[Path, Path], tmp_path: Path, method: str) -> None:
    """They draft from all tokens, so that answers are of all tokens. The second token is drafted:
    the last one never is."""
    if method == "mtp":
        folder = agreeing(vocab_size=VOCAB).save(tmp_path)
        source, config = held(folder, mtp=True), {"draft": "mtp"}
    else:
        folder, head = folders
        source, config = held(folder, head=head), {}
    options = {"ignore_eos": True, "temperature": 0.5}
    befores = [PROMPT, *([*PROMPT, token] for token in range(VOCAB))]
    run = DecoderRun(load_model(folder, "cpu", torch.float32, max_context=128), befores)
    run.step({row: len(before) for row, before in enumerate(befores)})
    logits = torch.stack([each[-1] for each in run.logits])
    weights = (logits / options["temperature"]).softmax(dim=-1).numpy()
    both = weights[0][:, None] * weights[1:]

    asked = [
        {"prompt": PROMPT, "max_tokens": 3, "seed": seed, **options} for seed in range(ANSWERS)
    ]
    streams, engine = drawn(source, asked, **config)
    (drafts,) = engine.stats().drafts
    assert drafts.method == method
    assert min(sum(drafts.accepted), sum(drafts.rejected)) > 40
    # In cells of about as much probability, by the order of the pairs' own.
    order = np.argsort(-both, axis=None)
    cell_of = np.empty(VOCAB * VOCAB, int)
    cell_of[order] = np.minimum(np.cumsum(both.flat[order]) * 24, 23)
    pairs = [stream.token_ids()[:2] for stream in streams]
    seen = np.bincount([cell_of[first * VOCAB + second] for first, second in pairs], minlength=24)
    check_counts(seen, np.bincount(cell_of, both.ravel(), 24))


def requests() -> list[dict[str, Any]]:
    options = {"prompt": PROMPT, "max_tokens": TOKENS, "allowed_token_ids": LETTERS}
    return [options | {"seed": seed} for seed in range(ANSWERS)]


def check(probabilities: Sequence[float], found: Any, method: str) -> None:
    streams, engine = found
    (drafts,) = engine.stats().drafts
    assert drafts.method == method
    assert min(sum(drafts.accepted), sum(drafts.rejected)) > 100
    counts = Counter(tuple(stream.token_ids()) for stream in streams)
    check_counts(np.array([counts[text] for text in TEXTS]), np.array(probabilities))


def check_counts(seen: npt.NDArray[Any], probabilities: npt.NDArray[Any]) -> None:
    """Cells with few expected draws are counted as one."""
    assert seen.sum() == ANSWERS
    expected = probabilities * ANSWERS
    few = expected < 8
    cells = [(seen[i], expected[i]) for i in np.flatnonzero(~few)]
    if few.any() and expected[few].sum():
        cells.append((seen[few].sum(), expected[few].sum()))
    assert len(cells) > 12
    found, wanted = np.array(cells).T
    assert chisquare(found, wanted * (found.sum() / wanted.sum())).pvalue > 1e-4
