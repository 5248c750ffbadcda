"""Mixtures of experts in recorded steps: every router there is, on the fake device, against the
same engine on a CPU."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch
from fakes.fake_device import FakeDevice, HiddenSyncError
from models.families import config_of

from asyncinfer.config import EngineConfig
from asyncinfer.engine.source import Loaded, Progress
from asyncinfer.models import layer_weights, parse_config
from asyncinfer.quantization.grouped import DenseGrouped
from asyncinfer.runner import ModelRunner
from asyncinfer.testing import InlineEngine, RandomModel

PROMPTS = ["def add(a, b):", "x", "import os\n\n\nclass Reader:"]


class OnFakeDevice:
    """A model source that runs another's model as on a GPU."""

    def __init__(self, source: RandomModel, device: FakeDevice) -> None:
        self._source = source
        self._device = device

    def load(self, config: EngineConfig, progress: Progress | None) -> Loaded:
        loaded = self._source.load(config, progress)
        plain = loaded.runner
        assert isinstance(plain, ModelRunner)
        spec = dataclasses.replace(plain.spec, overlap=2)
        runner = ModelRunner(plain.decoder, plain.kv, spec, accelerator=self._device)
        return dataclasses.replace(loaded, runner=runner)


def grouped(weight: torch.Tensor, bias: torch.Tensor | None = None, **_: Any) -> DenseGrouped:
    return DenseGrouped(weight, bias)


FAMILIES = {
    "mixtral": "MixtralForCausalLM",
    "qwen3_moe": "Qwen3MoeForCausalLM",
    "gpt_oss": "GptOssForCausalLM",
    "deepseek_v2": "DeepseekV2ForCausalLM",
    "deepseek_v3": "DeepseekV3ForCausalLM",
}


def source(family: str) -> RandomModel:
    config = config_of(family, "plain", vocab_size=300).to_dict()
    return RandomModel(parse_config({**config, "architectures": [FAMILIES[family]]}), seed=3)


OPTIONS: dict[str, Any] = {
    "device": "cpu",
    "max_context": 64,
    "kv_bytes": 1 << 20,
    "max_running": 4,
}


def answers(engine: InlineEngine) -> list[list[int]]:
    streams = [
        engine.submit(prompt, max_tokens=length, temperature=0.0, ignore_eos=True)
        for prompt, length in zip(PROMPTS, (12, 7, 10), strict=True)
    ]
    engine.run()
    for stream in streams:
        stream.read()
        assert stream.error is None
    return [stream.token_ids() for stream in streams]


@pytest.mark.parametrize("family", FAMILIES)
def test_the_same_tokens_recorded(family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(layer_weights, "make_grouped_linear", grouped)
    expected = answers(InlineEngine(source(family), **OPTIONS))
    with FakeDevice() as device:
        assert answers(InlineEngine(OnFakeDevice(source(family), device), **OPTIONS)) == expected
    assert device.calls["Graph.replay"] > 5
    assert len({token for tokens in expected for token in tokens}) > 5


def test_experts_that_ask_the_host_cannot_be_recorded() -> None:
    with FakeDevice() as device:
        engine = InlineEngine(OnFakeDevice(source("mixtral"), device), **OPTIONS)
        with pytest.raises(HiddenSyncError, match="tolist"):
            answers(engine)
