"""A tiny random decoder, its answers computed whole, and a hand that writes plans."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from asyncinfer.attention import AttentionBatch, KVCache
from asyncinfer.cache import KVGroupSpec
from asyncinfer.models import Decoder, ModelConfig, tensor_table
from asyncinfer.params import SamplingParams
from asyncinfer.runner import ModelRunner
from asyncinfer.runner.memory import GPU_OVERLAP
from asyncinfer.scheduler import Join, PageChanges, RunnerSpec, Step, StepResult

CONFIG = ModelConfig(
    architecture="LlamaForCausalLM",
    vocab_size=60,
    hidden_size=32,
    intermediate_size=48,
    num_layers=2,
    num_heads=4,
    num_kv_heads=2,
    head_dim=8,
    max_context=640,
)
#: The tokenizer's: the last five rows of the embedding are padding.
VOCAB = 55
BLOCK = 4


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is asked of a GPU before a model is on it."""
    about = SimpleNamespace(
        name="a GPU",
        major=9,
        minor=0,
        shared_memory_per_block=48 << 10,
        shared_memory_per_block_optin=227 << 10,
    )
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: about)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: (9, 0))
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda _: (1 << 36, 1 << 36))


@pytest.fixture(scope="session")
def decoder() -> Decoder:
    return make_decoder()


def make_decoder() -> Decoder:
    """Random weights, the same every time."""
    numbers = torch.Generator().manual_seed(3)

    def weight(name: str) -> torch.Tensor:
        shape = tensor_table(CONFIG)[name].shape
        if len(shape) == 1:
            return torch.ones(shape)
        return torch.randn(shape, generator=numbers) * (2.0 if "head" in name else 0.3)

    return Decoder(CONFIG, weight)


@pytest.fixture(scope="session")
def whole(decoder: Decoder) -> Callable[[Sequence[int]], torch.Tensor]:
    """float32 `[tokens, VOCAB]`: the logits at every position, in one forward pass."""

    @torch.inference_mode()
    def logits(tokens: Sequence[int]) -> torch.Tensor:
        n = len(tokens)
        kv = KVCache.allocate(CONFIG, 1, n, torch.float32, "cpu")
        positions = torch.arange(n)
        batch = AttentionBatch(
            block_tables=torch.zeros(1, 1, dtype=torch.int32),
            seq_lens=torch.tensor([n], dtype=torch.int32),
            query_starts=torch.tensor([0, n], dtype=torch.int32),
            slot_mapping=positions,
            starts=[0],
            counts=[n],
            block_size=n,
            decode_rows=int(n == 1),
        )
        hidden = decoder.forward(torch.tensor(tokens), positions, [kv], [batch])
        return decoder.logits(hidden)[:, :VOCAB]

    return logits


class Hand:
    """Writes plans for a runner: gives blocks in a scattered order, tells which are new."""

    def __init__(
        self,
        decoder: Decoder,
        *,
        slots: int = 6,
        blocks: int = 400,
        overlap: int = GPU_OVERLAP,
        **runner: Any,
    ) -> None:
        self.spec = RunnerSpec(
            groups=(KVGroupSpec(blocks),),
            block_size=BLOCK,
            max_slots=slots,
            max_context=CONFIG.max_context,
            vocab_size=VOCAB,
            max_step_tokens=96,
            overlap=overlap,
        )
        self.kv = KVCache.allocate(decoder.config, blocks, BLOCK, decoder.dtype, "cpu")
        self.kv.storage.fill_(torch.nan)
        self.runner = ModelRunner(decoder, [self.kv], self.spec, **runner)
        self.free = [(7 * i + 3) % blocks for i in range(blocks)]
        self.tables: dict[int, list[int]] = {}
        self.plan = Step(0, groups=[PageChanges()])

    def join(
        self,
        slot: int,
        tokens: Sequence[int],
        *,
        prompt_len: int | None = None,
        seed: int = 0,
        blocks: Sequence[int] = (),
        adapter: int = -1,
        **options: Any,
    ) -> None:
        """A sequence for the next step, `blocks` being what it has already."""
        self.tables[slot] = list(blocks)
        params = SamplingParams(**{"temperature": 0.0, **options})
        n = len(tokens) if prompt_len is None else prompt_len
        self.plan.joins.append(
            Join(slot, list(tokens), n, [list(blocks)], params, seed, adapter=adapter)
        )

    def row(self, slot: int, start: int, count: int, samples: int = 1) -> None:
        """A row of the next step; its blocks grow as it needs them."""
        table = self.tables[slot]
        while len(table) * BLOCK < start + count:
            self.plan.groups[0].grown.append((slot, len(table), self.free[0]))
            table.append(self.free.pop(0))
        self.plan.slots.append(slot)
        self.plan.starts.append(start)
        self.plan.counts.append(count)
        self.plan.samples.append(samples)

    def leave(self, slot: int) -> None:
        self.plan.leaves.append(slot)
        self.free += self.tables.pop(slot)

    def launch(self) -> object:
        plan, self.plan = self.plan, Step(self.plan.number + 1, groups=[PageChanges()])
        return self.runner.launch(plan)

    def step(self) -> StepResult:
        return self.runner.collect(self.launch())

    def decode(self, slot: int, position: int, count: int) -> list[int]:
        """`count` tokens, one step each, the first of them fed at `position`."""
        tokens = []
        for p in range(position, position + count):
            self.row(slot, p, 1)
            tokens += self.step().tokens
        return tokens


@pytest.fixture
def new_hand(decoder: Decoder) -> Callable[[], Hand]:
    return lambda: Hand(decoder)


@pytest.fixture
def make_hand(decoder: Decoder) -> Callable[..., Hand]:
    return lambda **options: Hand(options.pop("decoder", decoder), **options)


@pytest.fixture
def hand(decoder: Decoder) -> Hand:
    return Hand(decoder)


@pytest.fixture(scope="session")
def greedy(whole: Any) -> Callable[[Sequence[int], int], list[int]]:
    """The greedy answer, each token from a forward pass over all before it."""

    def answer(tokens: Sequence[int], count: int) -> list[int]:
        known = list(tokens)
        for _ in range(count):
            known.append(int(whole(known)[-1].argmax()))
        return known[len(tokens) :]

    return answer
