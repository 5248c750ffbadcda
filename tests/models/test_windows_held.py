"""Models with windows through scheduler and runner: what is held, and that what was given back is
not missed. Pages that became free are filled with NaN."""

from __future__ import annotations

import contextlib
from collections import deque
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from attention.rounding import poison
from fakes.fake_device import FakeDevice
from models.checkpoints import expected
from models.families import random_model
from transformers import PreTrainedModel

from asyncinfer.attention import KVCache, kv_format
from asyncinfer.cache import PrefixCache
from asyncinfer.config import EngineConfig
from asyncinfer.models import layer_weights, load_model
from asyncinfer.params import SamplingParams
from asyncinfer.quantization.grouped import DenseGrouped
from asyncinfer.runner import ModelRunner, plan_memory
from asyncinfer.scheduler import FCFS, Scheduler, Sequence
from asyncinfer.testing.invariants import check_drained, check_invariants

FAMILIES = {
    "mistral": "window",
    "gemma2": "plain",
    "gemma3_text": "plain",
    "gpt_oss": "plain",
}
#: Tokens per block, and most query tokens of a step.
BLOCK, CHUNK = 4, 24


def grouped(weight: torch.Tensor, bias: torch.Tensor | None = None, **_: Any) -> DenseGrouped:
    """A GPU's layer: experts' products that ask the host nothing, so that they are recorded."""
    return DenseGrouped(weight, bias)


class Held:
    """Runs requests to their end, `depth` steps in flight."""

    def __init__(
        self,
        model: PreTrainedModel,
        folder: Path,
        depth: int,
        device: FakeDevice | None = None,
        kv: Any = "plain",
    ) -> None:
        model.save_pretrained(folder)
        decoder = load_model(folder, "cpu", torch.float32, max_context=256)
        config = EngineConfig(
            block_size=BLOCK,
            max_step_tokens=CHUNK,
            max_running=4,
            max_context=256,
            kv_bytes=1 << 24,
            overlap=depth,
            kv=kv,
        )
        self.spec = plan_memory(config, decoder.config, torch.float32, decoder.device, 199)
        far, near = (
            KVCache.allocate(
                decoder.config,
                group.num_pages,
                BLOCK,
                torch.float32,
                "cpu",
                format=kv_format(kv),
                layers=group.layers,
            )
            for group in self.spec.groups
        )
        self.far, self.near = far, near
        poison(near)
        poison(far)
        options: dict[str, Any] = {} if device is None else {"accelerator": device}
        self.runner = ModelRunner(decoder, [far, near], self.spec, **options)
        self.scheduler = Scheduler(
            self.spec, policy=FCFS(), cache=PrefixCache(BLOCK, secret=b"windows")
        )
        self.depth = depth
        self.sequences: list[Sequence] = []
        #: Most window pages of one request at a time.
        self.most = 0

    def ask(self, prompt: list[int], count: int, n: int = 1) -> list[Sequence]:
        params = SamplingParams(temperature=0.0, max_tokens=count, n=n)
        answers: list[Sequence] = []
        for index in range(n):
            answers.append(
                Sequence(
                    len(self.sequences),
                    prompt,
                    params,
                    max_total=len(prompt) + count,
                    seed=0,
                    arrival=0.0,
                    index=index,
                    fork_of=answers[0] if index else None,
                )
            )
            self.sequences.append(answers[-1])
            self.scheduler.add(answers[-1])
        return answers

    def run(self) -> None:
        flights: deque[Any] = deque()
        _, windows = self.scheduler.states.slots.blocks.groups
        while True:
            while len(flights) < self.depth and (plan := self.scheduler.schedule(0.0)):
                flights.append((plan, self.runner.launch(plan)))
            for sequence in self.sequences:
                self.most = max([self.most, *(table.held for table in sequence.tables[1:])])
            if not flights:
                break
            plan, handle = flights.popleft()
            self.scheduler.update(plan, self.runner.collect(handle), 0.0)
            assert not plan.failed
            check_invariants(self.scheduler, self.sequences)
            if not flights:
                poison(self.near, windows.pool.free)
        check_drained(self.scheduler)


@pytest.fixture
def device(
    request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch
) -> Iterator[FakeDevice | None]:
    if request.param == "graphs":
        monkeypatch.setattr(layer_weights, "make_grouped_linear", grouped)
    with FakeDevice() if request.param == "graphs" else contextlib.nullcontext() as device:
        yield device


@pytest.mark.parametrize(
    ("device", "depth"), [("cpu", 1), ("cpu", 3), ("graphs", 3)], indirect=["device"]
)
@pytest.mark.parametrize("family", FAMILIES)
def test_window_and_chunk_are_all_that_is_held(
    family: str, depth: int, tmp_path: Path, device: FakeDevice | None
) -> None:
    model = random_model(family, FAMILIES[family])
    held = Held(model, tmp_path, depth, device)
    window = held.spec.groups[1].window
    assert window is not None
    assert held.far.num_layers + held.near.num_layers == model.config.num_hidden_layers
    assert (held.far.num_layers == 0) == (family == "mistral")

    numbers = torch.Generator().manual_seed(5)
    shared = torch.randint(3, 199, (100,), generator=numbers).tolist()
    held.ask([*shared, 7, 8, 9], 60)
    held.run()
    # The window, however it lies in its blocks, and a chunk for every step in flight.
    assert held.most <= -(-(window - 1) // BLOCK) + depth * (CHUNK // BLOCK) + 1
    assert held.most * BLOCK < 100

    # The prefix is longer than the window, and was passed by long ago.
    (again, *_) = held.ask([*shared, 11, 12], 40)
    held.ask([*shared, 13], 20, n=3)
    held.ask(shared[50:], 30)
    held.run()
    assert again.cached_tokens == 100
    assert held.scheduler.counters.forks == 2
    assert len(held.sequences[0].tokens) - held.sequences[0].prompt_len == 60

    for sequence in held.sequences:
        logits = expected(model, torch.tensor(sequence.tokens))
        for at in range(sequence.prompt_len, len(sequence.tokens)):
            best = logits[at - 1].max().item()
            assert logits[at - 1, sequence.tokens[at]].item() == pytest.approx(best, abs=1e-4)
