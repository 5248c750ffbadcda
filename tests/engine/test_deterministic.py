"""`deterministic=True` on the shipped model: whatever a request shares its steps with, and however
its prompt gets computed, it gets the same tokens and logprobs to the last bit."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from asyncinfer import Engine
from asyncinfer.attention import KVCache
from asyncinfer.builtin import MODEL_PATH
from asyncinfer.chunk import TokenLogprob
from asyncinfer.engine.checkpoint import CheckpointSource
from asyncinfer.models import read_config
from asyncinfer.scheduler import Step
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


def answers(inline: InlineEngine, requests: list[dict[str, Any]]) -> list[Answer]:
    """All at once."""
    streams = [inline.submit(**request) for request in requests]
    inline.run()
    found: list[Answer] = []
    for stream in streams:
        stream.read()
        assert stream.error is None
        outcome = stream.request.buffer.outcome
        assert outcome is not None
        scores = tuple(score for chunk in stream.chunks for score in chunk.logprobs)
        prompt = stream.request.prompt_logprobs
        prompt_scores = None if prompt is None else [entry for part in prompt for entry in part]
        found.append((tuple(stream.token_ids()), scores, prompt_scores))
    return found


@pytest.fixture(scope="module")
def alone() -> list[Answer]:
    """Each by itself, in an engine that computes its whole prompt at once."""
    inline = engine(prefix_cache=False)
    found = [answers(inline, [request])[0] for request in REQUESTS]
    assert all(len(tokens) == len(scores) == 14 for tokens, scores, _ in found)
    return found


def test_sixteen_together(alone: list[Answer]) -> None:
    assert answers(engine(prefix_cache=False), REQUESTS) == alone


def test_in_another_order_a_few_at_a_time(alone: list[Answer]) -> None:
    found = answers(engine(prefix_cache=False, max_running=5), REQUESTS[::-1])
    assert found[::-1] == alone


@pytest.mark.parametrize("budget", [24, 7])
def test_prompts_in_chunks(alone: list[Answer], budget: int) -> None:
    inline = engine(prefix_cache=False, max_step_tokens=budget, max_running=7)
    assert answers(inline, REQUESTS) == alone


def test_chunks_that_follow_the_clock(alone: list[Answer]) -> None:
    inline = engine(prefix_cache=False, step_target=0.05)
    run = inline.core.runner.launch

    def launch(step: Step) -> object:
        inline.now += 0.004 * step.tokens
        return run(step)

    inline.core.runner.launch = launch  # type: ignore[method-assign]
    ahead = inline.submit(**REQUESTS[0])
    inline.pump(2)
    assert answers(inline, REQUESTS[1:5]) == alone[1:5]
    ahead.read()
    assert tuple(ahead.token_ids()) == alone[0][0]


def test_prefixes_from_the_cache(alone: list[Answer]) -> None:
    inline = engine()
    for turn in range(2):
        assert answers(inline, REQUESTS) == alone
        if turn:
            assert inline.stats().cached_tokens > 100


def test_after_preemption(alone: list[Answer]) -> None:
    block = KVCache.bytes_per_block(read_config(MODEL_PATH), 4, torch.float32)
    inline = engine(prefix_cache=False, block_size=4, kv_bytes=40 * block, max_context=160)
    assert answers(inline, REQUESTS) == alone
    assert inline.stats().preemptions >= 3


def test_with_two_steps_in_flight(alone: list[Answer]) -> None:
    assert answers(engine(overlap=2, max_step_tokens=40), REQUESTS) == alone


def test_answers_that_share_a_prompt() -> None:
    request = {**REQUESTS[3], "n": 3, "prompt": SHARED}
    found = []
    for batch in ([], REQUESTS):
        inline = engine()
        stream = inline.submit(**request)
        others = [inline.submit(**other) for other in batch]
        inline.run()
        stream.read()
        assert stream.error is None
        assert len(others) == len(batch)
        found.append([[c for c in stream.chunks if c.index == index] for index in range(3)])
        assert inline.scheduler.counters.forks == 2
    assert found[0] == found[1]
    assert len({tuple(chunk.token_ids for chunk in answer) for answer in found[0]}) == 3


@pytest.mark.asyncio
async def test_a_context_shorter_than_what_the_tiles_are_tried_with() -> None:
    async with Engine(deterministic=True, max_context=24) as engine:
        done = await engine.generate("def", max_tokens=4, ignore_eos=True)
        assert len(done.token_ids) == 4
