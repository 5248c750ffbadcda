"""Prompts beside answers in recorded steps: an engine on the fake device answers as one on a CPU
does, whatever is asked of it, and no step is computed layer by layer."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
from fakes.fake_device import FakeDevice

from asyncinfer.config import EngineConfig
from asyncinfer.engine.source import Loaded, Progress
from asyncinfer.models import LayerConfig, ModelConfig
from asyncinfer.runner import ModelRunner
from asyncinfer.runner.eager_executor import EagerExecutor
from asyncinfer.runner.graph_executor import GraphExecutor
from asyncinfer.testing import InlineEngine, RandomModel

MODEL = ModelConfig(
    architecture="LlamaForCausalLM",
    vocab_size=300,
    hidden_size=32,
    intermediate_size=48,
    num_layers=2,
    num_heads=4,
    num_kv_heads=2,
    head_dim=8,
    max_context=64,
)
WINDOWED = dataclasses.replace(
    MODEL, layers=tuple(LayerConfig(rope=MODEL.layer(0).rope, window=w) for w in (None, 12))
)
CHUNKED = dataclasses.replace(
    MODEL,
    layers=tuple(
        dataclasses.replace(layer, chunked=bool(layer.window)) for layer in WINDOWED.layers
    ),
)
#: A block is 1 KiB, and a chunk of a prompt at most 20 tokens.
OPTIONS: dict[str, Any] = {
    "device": "cpu",
    "max_context": 64,
    "block_size": 4,
    "kv_bytes": 1 << 17,
    "max_running": 4,
    "max_step_tokens": 20,
}
PROMPTS = [
    "def add(a, b):",
    "x",
    "import os\n\n\nclass Reader:\n    def read(self, path)",
    "for i in range(10): print(i)",
    "a a a a a a a a",
]
#: Steps that were computed as they are, on the fake device.
Eager = list[int]


class Ending(RandomModel):
    """Has a token that ends an answer, which a grammar needs."""

    def load(self, config: EngineConfig, progress: Any = None) -> Loaded:
        loaded = super().load(config, progress)
        loaded.tokenizer.eos_ids = frozenset({MODEL.vocab_size - 1})
        return loaded


class OnFakeDevice:
    """A model source that runs another's model as on a GPU."""

    def __init__(self, source: RandomModel, device: FakeDevice, overlap: int) -> None:
        self._source = source
        self._device = device
        self._overlap = overlap

    def load(self, config: EngineConfig, progress: Progress | None) -> Loaded:
        loaded = self._source.load(config, progress)
        plain = loaded.runner
        assert isinstance(plain, ModelRunner)
        spec = dataclasses.replace(plain.spec, overlap=self._overlap)
        runner = ModelRunner(plain.decoder, plain.kv, spec, accelerator=self._device)
        return dataclasses.replace(loaded, runner=runner)


def answers(engine: InlineEngine, options: dict[str, Any]) -> list[Any]:
    """Everything that somebody gets, of requests that come one after the other."""
    streams = []
    for seed, prompt in enumerate(PROMPTS):
        given = {"max_tokens": 9, "temperature": 0.0, "ignore_eos": True, "seed": seed}
        streams.append(engine.submit(prompt, **{**given, **options}))
        engine.pump(3)
    engine.run()
    found: list[Any] = []
    for stream in streams:
        chunks = stream.read()
        assert stream.error is None
        found += [stream.token_ids(index) for index in range(options.get("n", 1))]
        for chunk in chunks:
            # Padding rounds products in another order.
            scores = chunk.logprobs or ()
            found.extend((each.token_id, round(each.logprob, 3)) for each in scores)
        outcome = stream.request.buffer.outcome
        assert outcome is not None
        for rows in outcome.prompt_logprobs or ():
            found.extend((each.token_id, round(each.logprob, 2)) for each in rows)
    return found


@pytest.fixture
def eager(monkeypatch: pytest.MonkeyPatch) -> Eager:
    found: Eager = []
    whole = EagerExecutor.forward

    def forward(executor: EagerExecutor, arrays: Any) -> Any:
        if isinstance(executor, GraphExecutor):
            found.append(len(arrays.positions))
        return whole(executor, arrays)

    monkeypatch.setattr(EagerExecutor, "forward", forward)
    return found


CASES: dict[str, tuple[ModelConfig, dict[str, Any], dict[str, Any]]] = {
    "greedy": (MODEL, {}, {}),
    "drawn": (MODEL, {}, {"temperature": 0.8}),
    "filtered": (MODEL, {}, {"temperature": 1.0, "top_p": 0.7, "top_k": 20}),
    "penalties": (MODEL, {}, {"frequency_penalty": 0.8, "repetition_penalty": 1.2}),
    "logprobs": (MODEL, {}, {"logprobs": 2}),
    "masks": (MODEL, {}, {"allowed_token_ids": [5, 17, 40, 299], "temperature": 1.0}),
    "several": (MODEL, {}, {"temperature": 0.8, "n": 3}),
    "prompt logprobs": (MODEL, {}, {"prompt_logprobs": 1}),
    "guidance": (MODEL, {}, {"guidance_scale": 2.0, "negative_prompt": "for x"}),
    "grammar": (MODEL, {}, {"regex": "[a-z0-9]{3,30}", "temperature": 1.0, "ignore_eos": False}),
    "windows": (WINDOWED, {}, {"temperature": 0.8}),
    # Rows that go on into the next chunk are computed as they are.
    "chunks": (CHUNKED, {}, {}),
    "int8": (MODEL, {"kv": "int8"}, {}),
    "fp8": (MODEL, {"kv": "fp8"}, {"temperature": 0.8}),
    # Two long sequences fit, so others are preempted.
    "preempted": (MODEL, {"kv_bytes": 1 << 14}, {"temperature": 0.8, "max_tokens": 20}),
    "drafts": (MODEL, {"proposers": ["prompt-lookup"]}, {"max_tokens": 14}),
}


#: With steps in flight, what they may take from each other.
AHEAD = [(case, 3) for case in ("drawn", "penalties", "windows", "preempted")]


@pytest.mark.parametrize(("case", "overlap"), [*((case, 1) for case in CASES), *AHEAD])
def test_the_same_answers(case: str, overlap: int, eager: Eager) -> None:
    model, config, options = CASES[case]
    source = Ending(model, seed=3)
    expected = answers(InlineEngine(source, **{**OPTIONS, **config}), options)
    with FakeDevice() as device:
        engine = InlineEngine(OnFakeDevice(source, device, overlap), **{**OPTIONS, **config})
        found = answers(engine, options)
    assert found == expected
    assert device.calls["Graph.replay"] > 10
    assert bool(eager) == (case == "chunks")
    stats = engine.stats()
    assert (stats.preemptions > 0) == (case == "preempted")
    accepted = sum(sum(method.accepted) for method in stats.drafts)
    assert (accepted > 0) == (case == "drafts")
