"""`Held`: a decoder that a test has loaded, for an engine."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from fakes.fake_device import FakeDevice

from asyncinfer import EngineConfig
from asyncinfer.engine import Loaded
from asyncinfer.models import Decoder
from asyncinfer.runner import ModelRunner, runner_of
from asyncinfer.testing.random_model import filler_tokenizer
from asyncinfer.text import Tokenizer


class Held:
    """A `ModelSource` of a decoder that is loaded already. `tokenizer` None: one whose tokens mean
    nothing, and of which none ends a text."""

    def __init__(self, decoder: Decoder, tokenizer: Tokenizer | None = None) -> None:
        self._decoder = decoder
        self._tokenizer = tokenizer

    def load(self, config: EngineConfig, progress: Any = None) -> Loaded:
        vocabulary = self._decoder.config.vocab_size
        tokenizer = self._tokenizer or filler_tokenizer(vocabulary)
        return Loaded(runner_of(self._decoder, config, vocabulary), tokenizer)


class OnDevice(Held):
    """A runner as on a GPU, which computes up to three steps ahead."""

    def __init__(
        self, decoder: Decoder, device: FakeDevice, tokenizer: Tokenizer | None = None
    ) -> None:
        super().__init__(decoder, tokenizer)
        self._device = device

    def load(self, config: EngineConfig, progress: Any = None) -> Loaded:
        loaded = super().load(config)
        runner = loaded.runner
        assert isinstance(runner, ModelRunner)
        spec = replace(runner.spec, overlap=3)
        # A head has a cache of its own in the first group.
        groups = [0] * len(runner.kv) if len(spec.groups) == 1 else None
        there = ModelRunner(
            runner.decoder, runner.kv, spec, accelerator=self._device, graphs="off", groups=groups
        )
        return Loaded(there, loaded.tokenizer)
