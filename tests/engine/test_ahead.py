"""The decode loop ahead of a device: the shipped model on the fake device, recorded steps and up to
four of them in flight, against the same engine on a CPU."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import Any

import pytest
from fakes.fake_device import FakeDevice

from asyncinfer.builtin import DRAFT_PATH
from asyncinfer.config import EngineConfig
from asyncinfer.engine.checkpoint import CheckpointSource
from asyncinfer.engine.source import Loaded, Progress
from asyncinfer.runner import ModelRunner
from asyncinfer.testing import InlineEngine
from asyncinfer.testing.invariants import check_drained, check_invariants

PROMPTS = [
    "def add(a, b):",
    "import os\n\n\nclass Reader:\n    def __init__(self, path):\n        self.path",
    "for i in range(10):\n    ",
    "try:\n    import json\nexcept ImportError:",
    "# A comment\nx = [1, 2, 3]\n",
    "class Stack:\n    def push(self, item):\n",
]


class OnFakeDevice:
    """A model source that runs a checkpoint as on a GPU."""

    def __init__(self, device: FakeDevice) -> None:
        self._device = device

    def load(self, config: EngineConfig, progress: Progress | None) -> Loaded:
        loaded = CheckpointSource(DRAFT_PATH).load(config, progress)
        plain = loaded.runner
        assert isinstance(plain, ModelRunner)
        spec = dataclasses.replace(plain.spec, overlap=config.overlap or 4)
        runner = ModelRunner(plain.decoder, plain.kv, spec, accelerator=self._device)
        return dataclasses.replace(loaded, runner=runner)


@pytest.fixture
def device() -> Iterator[FakeDevice]:
    with FakeDevice() as fake:
        yield fake


def engines(device: FakeDevice, overlap: int | None, **options: Any) -> Iterator[InlineEngine]:
    options = {"device": "cpu", "max_context": 96, "kv_bytes": 1 << 22, **options}
    yield InlineEngine(CheckpointSource(DRAFT_PATH), **options)
    yield InlineEngine(OnFakeDevice(device), overlap=overlap, **options)


def run(engine: InlineEngine, streams: list[Any]) -> list[Any]:
    """To the end, with every invariant checked after every turn; what each stream got."""
    sequences = [answer.sequence for stream in streams for answer in stream.request.outputs]
    for _ in range(500):
        engine.pump()
        sequences = sequences or [
            answer.sequence for stream in streams for answer in stream.request.outputs
        ]
        check_invariants(engine.scheduler, sequences)
        for stream in streams:
            stream.read()
        if not engine.core.busy and engine.core.inbox.empty():
            break
    assert not engine.core.busy
    if engine.scheduler.cache is None:
        check_drained(engine.scheduler)
    assert all(stream.error is None for stream in streams)
    return [
        (stream.token_ids(), stream.text(), stream.chunks[-1].finish_reason) for stream in streams
    ]


@pytest.mark.parametrize("overlap", [1, 4, None])
def test_what_is_drawn_past_a_stop_is_thrown_away(device: FakeDevice, overlap: int | None) -> None:
    found = []
    for engine in engines(device, overlap, prefix_cache=False):
        streams = [
            engine.submit(prompt, max_tokens=6 + 5 * i, temperature=0.0, stop=["\n"][: i % 2])
            for i, prompt in enumerate(PROMPTS)
        ]
        found.append(run(engine, streams))
        drawn = engine.stats().generated_tokens
    assert found[0] == found[1]
    assert {reason for *_, reason in found[0]} == {"stop", "length"}
    assert drawn >= sum(len(tokens) for tokens, *_ in found[1])
    assert device.calls["Graph.replay"] > 5


def test_preempted_and_seated_again_under_steps_in_flight(device: FakeDevice) -> None:
    found = []
    for engine in engines(device, 3, prefix_cache=False, block_size=4, max_context=64):
        block = engine.core.runner.kv[0].storage[:, :, 0].nbytes  # type: ignore[attr-defined]
        kv_bytes = 24 * block
        break
    for engine in engines(
        device, 3, prefix_cache=False, block_size=4, max_context=64, kv_bytes=kv_bytes
    ):
        options = {"max_tokens": 24, "ignore_eos": True, "temperature": 0.9}
        streams = [engine.submit(p, seed=i, **options) for i, p in enumerate(PROMPTS)]
        found.append(run(engine, streams))
        assert engine.stats().preemptions > 0
    assert found[0] == found[1]


def test_aborts_and_late_comers_under_steps_in_flight(device: FakeDevice) -> None:
    found = []
    for engine in engines(device, 4):
        options = {"max_tokens": 20, "ignore_eos": True, "temperature": 0.0}
        first = [engine.submit(prompt, **options) for prompt in PROMPTS[:4]]
        engine.pump(5)
        first[1].abort()
        first[2].stop()
        late = [engine.submit(prompt, **options) for prompt in PROMPTS[2:]]
        engine.pump(3)
        late[0].abort()
        engine.run()
        kept = [first[0], first[3], *late[1:]]
        for stream in kept:
            stream.read()
        found.append([stream.token_ids() for stream in kept])
        assert len(engine.scheduler.in_flight) == 0
    assert found[0] == found[1]
    assert all(len(tokens) == 20 for tokens in found[0])


def test_the_next_step_is_launched_before_the_last_is_collected(device: FakeDevice) -> None:
    _, engine = engines(device, 2)
    stream = engine.submit(PROMPTS[0], max_tokens=30, ignore_eos=True, temperature=0.0)
    engine.pump(4)
    order: list[str] = []
    runner = engine.core.runner
    for name in ("launch", "collect"):
        whole = getattr(runner, name)

        def noted(argument: Any, name: str = name, whole: Any = whole) -> Any:
            order.append(name)
            return whole(argument)

        setattr(runner, name, noted)
    engine.pump(3)
    assert order == ["launch", "collect"] * 3
    assert len(engine.scheduler.in_flight) == 1
    engine.run()
    stream.read()
    assert len(stream.token_ids()) == 30


def drawn(engine: InlineEngine, each: list[dict[str, Any]]) -> list[list[int]]:
    options: dict[str, Any] = {"max_tokens": 8, "ignore_eos": True, "temperature": 0.8}
    streams = [
        engine.submit(prompt, seed=i, **{**options, **more})
        for i, (prompt, more) in enumerate(zip(PROMPTS, each, strict=False))
    ]
    engine.run()
    for stream in streams:
        stream.read()
        assert stream.error is None
    return [stream.token_ids() for stream in streams]


def test_guided_answers_beside_recorded_steps(device: FakeDevice) -> None:
    each = [{"guidance_scale": 1.8, "max_tokens": 3}, {"max_tokens": 7}]
    plain, ahead = (drawn(engine, each) for engine in engines(device, 2))
    assert plain == ahead
    assert device.calls["Graph.replay"] > 2


def test_a_draft_model_beside_recorded_steps(device: FakeDevice) -> None:
    draft = CheckpointSource(DRAFT_PATH, draft=True)
    plain = drawn(next(engines(device, 2)), [{}])
    _, ahead = engines(device, 2, draft=draft)
    assert drawn(ahead, [{}]) == plain
    (drafts,) = ahead.stats().drafts
    assert sum(drafts.accepted) > 1
