"""Layers with a state on a GPU: the decode loop ahead of a fake device, against the same engine on
a CPU."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from fakes.fake_device import FakeDevice
from models.families import randomised
from models.held import Held, OnDevice
from models.hybrids import HYBRIDS
from models.test_families_in_engine import Guesses

from asyncinfer.config import Graphs
from asyncinfer.models import Decoder, load_model
from asyncinfer.testing import InlineEngine
from asyncinfer.testing.invariants import check_invariants

OPTIONS: dict[str, Any] = {
    "device": "cpu",
    "dtype": "float32",
    "max_context": 96,
    "max_running": 8,
    "max_step_tokens": 23,
    "block_size": 8,
    "kv_bytes": 1 << 22,
    "cpu_threads": 1,
}
#: Where there is no Triton, the host counts the tokens of experts, and so waits for the device.
WITHOUT_EXPERTS = ["falcon-h1", "lfm2", "olmo-hybrid", "qwen3.5"]


@pytest.fixture
def device() -> Iterator[FakeDevice]:
    with FakeDevice() as fake:
        yield fake


def hybrid(kind: str, folder: Path) -> Decoder:
    randomised(HYBRIDS[kind][1][0]).save_pretrained(folder)
    return load_model(folder, "cpu", torch.float32, max_context=96)


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
    # Batches of every size, which recorded steps fill up with padding; one begins with its answer.
    found += run(*(ask(prompt(1 + 5 * n), max_tokens=12 + 2 * n) for n in range(5)))
    found += run(ask([*first[:27], *prompt(10)], temperature=0.7, seed=3))
    return found


@pytest.mark.parametrize(
    ("kind", "overlap", "graphs"),
    [
        # Of those that are recorded, the steps before a recording are such steps, too.
        *((kind, 3, "off") for kind in sorted(HYBRIDS) if kind not in WITHOUT_EXPERTS),
        *((kind, 3, "lazy") for kind in WITHOUT_EXPERTS),
        *((kind, 1, "start") for kind in WITHOUT_EXPERTS),
    ],
)
def test_states_are_those_of_a_cpu(
    kind: str, overlap: int, graphs: Graphs, device: FakeDevice, tmp_path: Path
) -> None:
    decoder = hybrid(kind, tmp_path)
    found = []
    for source in (Held(decoder), OnDevice(decoder, device, graphs=graphs)):
        guesses = Guesses()
        with device.unwatched() if not found else nullcontext():
            engine = InlineEngine(source, **OPTIONS, overlap=overlap, proposers=[guesses])
            found.append(answers(engine, guesses))
    assert found[0] == found[1]
    assert len({tuple(each) for each in found[0]}) > 4
    assert (device.calls["Graph.replay"] > 20) == (graphs != "off")


@pytest.mark.parametrize("kind", WITHOUT_EXPERTS)
def test_no_step_waits_for_the_device(kind: str, device: FakeDevice, tmp_path: Path) -> None:
    """Neither one with a prompt nor one of decode rows."""
    source = OnDevice(hybrid(kind, tmp_path), device)
    engine = InlineEngine(source, **OPTIONS, overlap=2)
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
