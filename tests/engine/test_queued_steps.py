"""Decode steps in a queue: an engine on a CPU answers as one does that computes each when it is
launched, whoever comes and goes meanwhile."""

from __future__ import annotations

import random
from collections import Counter
from typing import Any

import pytest

from asyncinfer.config import EngineConfig
from asyncinfer.engine.source import Loaded
from asyncinfer.kernels.native import available
from asyncinfer.models import ModelConfig
from asyncinfer.runner.queue_pace import MOST_QUEUED, QueuePace
from asyncinfer.runner.step_queue import StepQueue
from asyncinfer.scheduler import Scheduler, Step
from asyncinfer.testing import InlineEngine, RandomModel

pytestmark = [
    pytest.mark.skipif(not available(), reason="no native code for this processor"),
    pytest.mark.usefixtures("laid_out"),
]

#: Wide enough for native code on every processor that has some.
MODEL = ModelConfig(
    architecture="LlamaForCausalLM",
    vocab_size=320,
    hidden_size=256,
    intermediate_size=256,
    num_layers=2,
    num_heads=4,
    num_kv_heads=2,
    head_dim=64,
    max_context=128,
)
OPTIONS: dict[str, Any] = {
    "device": "cpu",
    "dtype": "float32",
    "max_context": 128,
    "block_size": 4,
    "kv_bytes": 1 << 22,
    "max_running": 4,
    "max_step_tokens": 40,
}
PROMPTS = ["def add(a, b):", "x", "import os\n\n\nclass Reader", "for i in range(10):", "a a a a a"]


class Ending(RandomModel):
    """Has tokens that end an answer, of which some are drawn."""

    def load(self, config: EngineConfig, progress: Any = None) -> Loaded:
        loaded = super().load(config, progress)
        loaded.tokenizer.eos_ids = frozenset(range(0, MODEL.vocab_size, 30))
        return loaded


@pytest.fixture
def _prompts_come_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """Steps with prompts are launched when the ones before them are committed: these would be told
    late, and seem to take the prompts' time."""
    schedule = Scheduler.schedule

    def checked(self: Scheduler, now: float) -> Step | None:
        before = len(self.in_flight)
        step = schedule(self, now)
        assert step is None or step.only_answers or not before
        return step

    monkeypatch.setattr(Scheduler, "schedule", checked)


@pytest.fixture
def in_flight(monkeypatch: pytest.MonkeyPatch) -> Counter[int]:
    """How many steps were in the queue behind each one that came, and how often."""
    found = Counter[int]()
    add = StepQueue.add

    def counted(self: StepQueue, *given: Any) -> Any:
        found[self.count] += 1
        return add(self, *given)

    monkeypatch.setattr(StepQueue, "add", counted)
    return found


def answers(options: dict[str, Any], config: dict[str, Any]) -> list[Any]:
    """What everybody gets, of requests that come one after the other, some of which are left."""
    engine = InlineEngine(Ending(MODEL, seed=3), **{**OPTIONS, **config})
    draw = random.Random(11)
    streams = []
    for turn in range(12):
        given = {"max_tokens": draw.randint(1, 40), "temperature": 0.0, "seed": turn}
        given |= {"ignore_eos": draw.random() < 0.7}
        if options.get("mixed") and turn % 3 == 0:
            given["temperature"] = 0.8
        given |= {name: value for name, value in options.items() if name != "mixed"}
        streams.append(engine.submit(draw.choice(PROMPTS), **given))
        engine.pump(draw.randint(1, 9))
        if turn % 5 == 4:
            streams.pop(draw.randrange(len(streams))).abort()
    engine.run()
    found = []
    for stream in streams:
        stream.read()
        assert stream.error is None
        found.append((stream.text(), stream.token_ids()))
    assert engine.stats().running == 0
    return found


CASES: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "greedy": ({}, {}),
    "some drawn": ({"mixed": True}, {}),
    "logprobs": ({"logprobs": 1}, {}),
    "stop": ({"stop": ["e"]}, {}),
    "grammar": ({"regex": "[a-z0-9]{3,30}", "ignore_eos": False}, {}),
    "preempted": ({"max_tokens": 40}, {"kv_bytes": 1 << 18}),
    "drafts": ({}, {"proposers": ["prompt-lookup"]}),
    "without a prefix cache": ({}, {"prefix_cache": False}),
}


#: Cases whose steps draw by more than their rows' largest logits.
AT_ONCE = ("logprobs", "grammar")


@pytest.mark.usefixtures("_prompts_come_alone")
@pytest.mark.parametrize("case", CASES)
def test_the_same_answers(
    case: str, in_flight: Counter[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    options, config = CASES[case]
    # Who comes when depends on the steps that were committed, and rows that are computed together
    # have the same bits as any others in native code.
    expected = [sorted(answers(options, {**config, "cuda_graphs": "off"}))]
    assert not in_flight
    for steps in (1, 2, 4, MOST_QUEUED):
        monkeypatch.setattr(QueuePace, "steps", steps)
        expected.append(sorted(answers(options, config)))
        # The first one of a sequence has none before it.
        assert (max(in_flight, default=0) > 0) == (steps > 1 and case not in AT_ONCE)
        assert max(in_flight, default=0) < steps
    assert all(found == expected[0] for found in expected)
