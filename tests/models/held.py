"""`Held`: a decoder that a test has loaded, for an engine."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import pytest
from fakes.fake_device import FakeDevice

from asyncinfer import EngineConfig
from asyncinfer.config import Graphs
from asyncinfer.engine import Loaded
from asyncinfer.models import Decoder
from asyncinfer.runner import ModelRunner, runner_of
from asyncinfer.runner.eager_executor import EagerExecutor
from asyncinfer.runner.graph_executor import GraphExecutor
from asyncinfer.testing.random_model import filler_tokenizer
from asyncinfer.text import Tokenizer


@contextmanager
def unrecorded_passes() -> Iterator[list[int]]:
    """The query tokens of passes within which a runner that records computed as they are."""
    found: list[int] = []
    whole = EagerExecutor.forward

    def forward(executor: EagerExecutor, arrays: Any) -> Any:
        if isinstance(executor, GraphExecutor):
            found.append(len(arrays.positions))
        return whole(executor, arrays)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(EagerExecutor, "forward", forward)
        yield found


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
    """A runner as on a GPU, which computes up to three steps ahead, and records none of them
    unless `graphs` says so."""

    def __init__(
        self,
        decoder: Decoder,
        device: FakeDevice,
        tokenizer: Tokenizer | None = None,
        *,
        graphs: Graphs = "off",
    ) -> None:
        super().__init__(decoder, tokenizer)
        self._device = device
        self._graphs = graphs

    def load(self, config: EngineConfig, progress: Any = None) -> Loaded:
        loaded = super().load(config)
        runner = loaded.runner
        assert isinstance(runner, ModelRunner)
        spec = replace(runner.spec, overlap=3)
        # A head has a cache of its own in the first group.
        groups = [0] * len(runner.kv) if len(spec.groups) == 1 else None
        there = ModelRunner(
            *(runner.decoder, runner.kv, spec),
            accelerator=self._device,
            graphs=self._graphs,
            groups=groups,
        )
        return Loaded(there, loaded.tokenizer)
