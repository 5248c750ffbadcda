"""Layers with a state on a GPU: the decode loop ahead of a fake device, against the same engine on
a CPU."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from fakes.fake_device import FakeDevice
from models.families import randomised
from models.hybrids import HYBRIDS
from models.test_families_in_engine import Guesses

from asyncinfer.config import EngineConfig
from asyncinfer.engine.source import Loaded, Progress
from asyncinfer.models import load_model
from asyncinfer.runner import ModelRunner
from asyncinfer.runner.opening import runner_of
from asyncinfer.testing import InlineEngine
from asyncinfer.testing.invariants import check_invariants
from asyncinfer.testing.random_model import filler_tokenizer

OPTIONS: dict[str, Any] = {
    "device": "cpu",
    "dtype": "float32",
    "max_context": 96,
    "max_step_tokens": 23,
    "block_size": 8,
    "kv_bytes": 1 << 22,
    "cpu_threads": 1,
}


class Source:
    """A model source of a folder's checkpoint, on a CPU or as on a GPU."""

    def __init__(self, folder: Path, device: FakeDevice | None = None) -> None:
        self._folder = folder
        self._device = device

    def load(self, config: EngineConfig, progress: Progress | None) -> Loaded:
        decoder = load_model(self._folder, "cpu", torch.float32, max_context=96)
        vocab = decoder.config.vocab_size
        runner = runner_of(decoder, config, vocab)
        if self._device is not None:
            spec = dataclasses.replace(runner.spec, overlap=config.overlap or 1)
            runner = ModelRunner(
                *(decoder, runner.kv, spec), accelerator=self._device, graphs="off", groups=(0, 1)
            )
        return Loaded(runner, filler_tokenizer(vocab))


@pytest.fixture
def device() -> Iterator[FakeDevice]:
    with FakeDevice() as fake:
        yield fake


def answers(engine: InlineEngine, guesses: Guesses) -> list[list[int]]:
    """Of a prompt in chunks, the same after a prefix hit and with drafts that are wrong at times,
    others side by side, and one that begins as another."""
    numbers = torch.Generator().manual_seed(5)

    def prompt(count: int) -> list[int]:
        return torch.randint(3, 190, (count,), generator=numbers).tolist()

    def ask(tokens: list[int], **options: Any) -> Any:
        defaults = {"max_tokens": 12, "temperature": 0.0, "ignore_eos": True}
        return engine.submit(tokens, **{**defaults, **options})

    def run(*streams: Any) -> list[list[int]]:
        while engine.core.busy or not engine.core.inbox.empty():
            engine.pump()
            check_invariants(
                engine.scheduler, [a.sequence for s in streams for a in s.request.outputs]
            )
            for stream in streams:
                stream.read()
        assert all(stream.error is None for stream in streams)
        return [stream.token_ids() for stream in streams]

    first = prompt(45)
    found = run(ask(first))
    guesses.known = [*first, *found[0]]
    found += run(ask(first))
    assert engine.stats().cached_tokens > 0
    found += run(*(ask(prompt(9 + 3 * number), max_tokens=20) for number in range(4)))
    found += run(ask([*first[:27], *prompt(10)], temperature=0.7, seed=3))
    return found


@pytest.mark.parametrize("overlap", [1, 4])
@pytest.mark.parametrize("kind", sorted(HYBRIDS))
def test_states_are_those_of_a_cpu(
    kind: str, overlap: int, device: FakeDevice, tmp_path: Path
) -> None:
    randomised(HYBRIDS[kind][1][0]).save_pretrained(tmp_path)
    found = []
    for source in (Source(tmp_path), Source(tmp_path, device)):
        guesses = Guesses()
        engine = InlineEngine(source, **OPTIONS, overlap=overlap, proposers=[guesses])
        found.append(answers(engine, guesses))
    assert found[0] == found[1]
    assert len({tuple(each) for each in found[0]}) > 4


@pytest.mark.parametrize("kind", ["falcon-h1", "lfm2", "nemotron-h", "olmo-hybrid", "qwen3.5"])
def test_no_step_waits_for_the_device(kind: str, device: FakeDevice, tmp_path: Path) -> None:
    """Neither one with a prompt nor one of decode rows. Experts are left out: where there is no
    Triton, the host counts their tokens."""
    config = HYBRIDS[kind][1][0]
    randomised(config).save_pretrained(tmp_path)
    engine = InlineEngine(Source(tmp_path, device), **OPTIONS, overlap=2)
    runner = engine.core.runner
    launch = runner.launch
    launched = []

    def strictly(step: Any) -> object:
        with device.without_syncs():
            handle = launch(step)
        launched.append(step.tokens)
        return handle

    runner.launch = strictly  # type: ignore[method-assign]
    stream = engine.submit([5] * 45, max_tokens=12, temperature=0.0, ignore_eos=True)
    other = engine.submit([7] * 9, max_tokens=12, temperature=0.0, ignore_eos=True)
    engine.run()
    for each in (stream, other):
        each.read()
        assert each.error is None
    assert max(launched) > 20
    assert launched.count(2) > 8
