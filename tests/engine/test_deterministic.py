"""`deterministic=True` on the shipped model: whatever a request shares its steps with, and however
its prompt gets computed, it gets the same tokens and logprobs to the last bit."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from asyncinfer.attention import KVCache
from asyncinfer.builtin import MODEL_PATH
from asyncinfer.chunk import TokenLogprob
from asyncinfer.engine.assemble import CheckpointSource
from asyncinfer.models import read_config
from asyncinfer.testing import InlineEngine

SHARED = "import os\nimport sys\n\n\ndef read_all(path):\n    with open(path) as file:\n        "
PROMPTS = [
    "def add(a, b):",
    SHARED + "return file.read()\n\n\ndef write_all(path, text):\n    ",
    SHARED + "for line in file:\n            yield line\n",
    "class Stack:\n    def push(self, item):\n        self.items.append(item)\n\n    def pop(self",
    "x",
    "for i in range(10):\n    ",
    "try:\n    import json\nexcept ImportError:",
    "# A comment about nothing in particular\n" * 5,
]
#: Sixteen requests: half of them greedy, the others drawn in several ways.
REQUESTS: list[dict[str, Any]] = [
    {"prompt": prompt, "logprobs": 1 + number % 3, "max_tokens": 14, "ignore_eos": True, **options}
    for number, prompt in enumerate(PROMPTS)
    for options in (
        {"temperature": 0.0},
        [
            {"temperature": 1.0, "seed": 5},
            {"temperature": 0.7, "top_p": 0.9, "seed": 6},
            {"temperature": 1.3, "top_k": 20, "frequency_penalty": 0.5, "seed": 7},
            {"temperature": 1.0, "sampler": "xtc", "seed": 8, "prompt_logprobs": 2},
        ][number % 4],
    )
]
Answer = tuple[tuple[int, ...], tuple[TokenLogprob, ...], Any]


def engine(**options: Any) -> InlineEngine:
    defaults: dict[str, Any] = {"device": "cpu", "kv_bytes": 1 << 24, "deterministic": True}
    return InlineEngine(CheckpointSource(MODEL_PATH), **{**defaults, **options})


def answers(its: InlineEngine, requests: list[dict[str, Any]]) -> list[Answer]:
    """All at once."""
    streams = [its.submit(**request) for request in requests]
    its.run()
    found: list[Answer] = []
    for stream in streams:
        stream.read()
        assert stream.error is None
        outcome = stream.job.buffer.outcome
        assert outcome is not None
        scores = tuple(its for chunk in stream.chunks for its in chunk.logprobs)
        prompt = stream.job.prompt_logprobs
        prompt_scores = None if prompt is None else [entry for part in prompt for entry in part]
        found.append((tuple(stream.token_ids()), scores, prompt_scores))
    return found


@pytest.fixture(scope="module")
def alone() -> list[Answer]:
    """Each by itself, in an engine that computes its whole prompt at once."""
    its = engine(prefix_cache=False)
    found = [answers(its, [request])[0] for request in REQUESTS]
    assert all(len(tokens) == len(scores) == 14 for tokens, scores, _ in found)
    return found


def test_sixteen_together(alone: list[Answer]) -> None:
    assert answers(engine(prefix_cache=False), REQUESTS) == alone


def test_in_another_order_a_few_at_a_time(alone: list[Answer]) -> None:
    found = answers(engine(prefix_cache=False, max_running=5), REQUESTS[::-1])
    assert found[::-1] == alone


@pytest.mark.parametrize("budget", [24, 7])
def test_prompts_in_chunks(alone: list[Answer], budget: int) -> None:
    its = engine(prefix_cache=False, max_step_tokens=budget, max_running=7)
    assert answers(its, REQUESTS) == alone


def test_prefixes_from_the_cache(alone: list[Answer]) -> None:
    its = engine()
    for turn in range(2):
        assert answers(its, REQUESTS) == alone
        if turn:
            assert its.stats().cached_tokens > 100


def test_after_preemption(alone: list[Answer]) -> None:
    block = KVCache.bytes_per_block(read_config(MODEL_PATH), 4, torch.float32)
    its = engine(prefix_cache=False, block_size=4, kv_bytes=40 * block, max_context=160)
    assert answers(its, REQUESTS) == alone
    assert its.stats().preemptions >= 3


def test_with_two_steps_in_flight(alone: list[Answer]) -> None:
    assert answers(engine(overlap=2, max_step_tokens=40), REQUESTS) == alone


def test_answers_that_share_a_prompt() -> None:
    request = {**REQUESTS[3], "n": 3, "prompt": SHARED}
    found = []
    for company in ([], REQUESTS):
        its = engine()
        stream = its.submit(**request)
        others = [its.submit(**other) for other in company]
        its.run()
        stream.read()
        assert stream.error is None
        assert len(others) == len(company)
        found.append([[c for c in stream.chunks if c.index == index] for index in range(3)])
        assert its.scheduler.counters.forks == 2
    assert found[0] == found[1]
    assert len({tuple(chunk.token_ids for chunk in answer) for answer in found[0]}) == 3
