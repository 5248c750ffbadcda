"""Models whose KV is held in 8 bits, against transformers with a cache that rounds the same way."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import anyio
import pytest
import torch
from attention.rounding import rounded
from fakes.fake_device import FakeDevice
from models.checkpoints import Sequences
from models.families import config_of, random_model, randomised
from models.rounded_cache import NEAR, rounded_logits
from models.sparse import INDEXED
from models.test_windows_held import Held
from transformers import DeepseekV32Config, PreTrainedModel

from asyncinfer import Completion, Engine
from asyncinfer.attention import KVCache, kv_format
from asyncinfer.attention.formats import PlainKV
from asyncinfer.builtin import MODEL_PATH
from asyncinfer.models import load_model, read_config

VOCABULARY = 4096
SHARED = 64


def expected(model: PreTrainedModel, ids: list[int], kv: str) -> torch.Tensor:
    """Log probabilities of what follows each token."""
    return rounded_logits(model, torch.tensor(ids), kv).log_softmax(-1)


@pytest.fixture
def anyio_backend() -> str:
    """One is enough: streams have their own tests."""
    return "asyncio"


class Asked:
    """Requests of one engine and what they got."""

    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        self.answers: list[tuple[list[int], Completion]] = []

    async def one(self, prompt: list[int], count: int, **options: Any) -> None:
        options |= {"temperature": 0.0, "logprobs": 0, "ignore_eos": True, "max_tokens": count}
        self.answers.append((prompt, await self.engine.generate(prompt, **options)))

    async def together(self, *requests: tuple[list[int], int]) -> None:
        async with anyio.create_task_group() as tasks:
            for request in requests:
                tasks.start_soon(self.one, *request)


def check(model: PreTrainedModel, asked: Asked, kv: str) -> None:
    """Each token is the best, as far as rounding can tell, and has the probability it should."""
    apart = 0.0
    for prompt, done in asked.answers:
        for choice in done.choices:
            ids = [*prompt, *choice.token_ids]
            chances = expected(model, ids, kv)
            plain = expected(model, ids, "plain")
            assert choice.logprobs is not None
            for at, scored in enumerate(choice.logprobs, start=len(prompt)):
                own = chances[at - 1]
                assert scored.logprob == pytest.approx(own[scored.token_id].item(), abs=NEAR)
                assert own.max() - own[scored.token_id] < NEAR
                apart = max(apart, abs(plain[at - 1, scored.token_id].item() - scored.logprob))
    # Had nothing been rounded, it would show.
    assert apart > 5 * NEAR


def saved(family: str, kind: str, folder: Path) -> PreTrainedModel:
    model = random_model(family, kind, vocab_size=VOCABULARY)
    model.save_pretrained(folder)
    for file in MODEL_PATH.glob("tokenizer*.json"):
        shutil.copy(file, folder)
    return model


class Prompts:
    """Random ones."""

    def __init__(self) -> None:
        self.numbers = torch.Generator().manual_seed(11)

    def __call__(self, count: int) -> list[int]:
        return torch.randint(3, 4000, (count,), generator=self.numbers).tolist()


OPTIONS: dict[str, Any] = {"device": "cpu", "dtype": "float32", "max_step_tokens": 24}


@pytest.mark.anyio
@pytest.mark.parametrize(
    ("family", "kind", "kv"),
    [
        ("qwen3", "tied", "fp8"),
        ("mistral", "window", "fp8"),
        ("gemma2", "plain", "int8"),
        ("qwen3", "tied", "int4"),
    ],
)
async def test_chunks_hits_forks_and_windows(
    family: str, kind: str, kv: Any, tmp_path: Path
) -> None:
    model, prompts = saved(family, kind, tmp_path), Prompts()
    shared = prompts(SHARED)
    async with Engine(str(tmp_path), kv_bytes=1 << 24, kv=kv, **OPTIONS) as engine:
        asked = Asked(engine)
        await asked.one(shared + prompts(3), 20)
        # The block that three answers begin in is half filled, and copied.
        await asked.one(shared + prompts(6), 8, n=3)
        await asked.together((shared + prompts(17), 20), (prompts(40), 20), (prompts(1), 20))
        assert [done.usage.cached_tokens for _, done in asked.answers[:2]] == [0, SHARED]
        check(model, asked, kv)


@pytest.mark.anyio
@pytest.mark.parametrize(
    ("family", "kind", "kv"), [("qwen3", "tied", "int8"), ("mistral", "window", "fp8")]
)
async def test_after_preemption(family: str, kind: str, kv: Any, tmp_path: Path) -> None:
    model, prompts = saved(family, kind, tmp_path), Prompts()
    shape = read_config(tmp_path)
    few = 8 * KVCache.bytes_per_block(shape, 16, torch.float32, kv_format(kv))
    options = {**OPTIONS, "prefix_cache": False, "max_context": 100}
    async with Engine(str(tmp_path), kv_bytes=few, kv=kv, **options) as engine:
        asked = Asked(engine)
        await asked.together(*((prompts(20), 30) for _ in range(4)))
        assert engine.stats().preemptions > 0
        check(model, asked, kv)


@pytest.mark.parametrize(("family", "kind"), [("gemma2", "plain"), ("mistral", "window")])
def test_recorded_steps(family: str, kind: str, tmp_path: Path) -> None:
    """On the fake device, three steps in flight; pages that became free read as NaN."""
    model = random_model(family, kind)
    with FakeDevice() as device:
        held = Held(model, tmp_path, 3, device, kv="fp8")
        shared = torch.randint(3, 199, (60,), generator=torch.Generator().manual_seed(5)).tolist()
        held.ask([*shared, 7, 8, 9], 30)
        held.run()
        (again, *_) = held.ask([*shared, 11, 12], 20)
        held.ask([*shared, 13], 10, n=3)
        held.run()
        assert device.calls["Graph.replay"] > 20
    assert again.cached_tokens == 60
    assert held.scheduler.counters.forks == 2
    apart = 0.0
    for sequence in held.sequences:
        ids = torch.tensor(sequence.tokens)
        logits, plain = (rounded_logits(model, ids, kv) for kv in ("fp8", "plain"))
        apart = max(apart, (logits - plain).abs().max().item())
        for at in range(sequence.prompt_len, len(sequence.tokens)):
            best = logits[at - 1].max().item()
            assert logits[at - 1, sequence.tokens[at]].item() == pytest.approx(best, abs=NEAR)
    assert apart > 5 * NEAR


@pytest.mark.anyio
@pytest.mark.parametrize("kv", ["fp8", "int8", "int4"])
async def test_deterministic(kv: Any, tmp_path: Path) -> None:
    """To the last bit alone, in a batch and from the cache, in chunks of any size."""
    saved("qwen3", "tied", tmp_path)
    prompts = Prompts()
    prompt, others = prompts(41), [prompts(n) for n in (9, 30)]
    found = []
    for chunk in (64, 10):
        options = {**OPTIONS, "max_step_tokens": chunk, "kv_bytes": 1 << 22, "deterministic": True}
        async with Engine(str(tmp_path), kv=kv, **options) as engine:
            asked = Asked(engine)
            await asked.together((prompt, 12), *((other, 12) for other in others))
            await asked.one(prompt, 12)
            assert asked.answers[-1][1].usage.cached_tokens == 32
            found += [done.logprobs for question, done in asked.answers if question is prompt]
    assert len(found) == 4
    assert found.count(found[0]) == 4


class RoundedKV(PlainKV):
    """Whole numbers in the cache, rounded on their way there."""

    exact = False

    def __init__(self, kv: str) -> None:
        self.kv = kv

    def encode(self, values: torch.Tensor) -> tuple[torch.Tensor]:
        return (rounded(values, self.kv).to(values.dtype),)


LATENT = {
    "deepseek_v2": config_of("deepseek_v2", "plain"),
    # All tokens are chosen: which of many has the better score a rounded key may change.
    "deepseek_v32": DeepseekV32Config(
        **INDEXED | {"n_group": 2, "topk_group": 1, "index_topk": 200}
    ),
}


@pytest.mark.parametrize("model", LATENT)
@pytest.mark.parametrize("kv", ["fp8", "int8", "int4"])
def test_latent_kv(kv: str, model: str, tmp_path: Path) -> None:
    """One vector for all heads; transformers keeps none. Chunks, a shared prefix, decode."""
    randomised(LATENT[model]).save_pretrained(tmp_path)
    decoder = load_model(tmp_path, "cpu", torch.float32, max_context=256)
    assert decoder.config.kv_parts == 1
    numbers = torch.Generator().manual_seed(5)
    ids = torch.randint(0, 199, (70,), generator=numbers)
    found = []
    for kv_kind in (kv_format(kv), RoundedKV(kv), kv_format("plain")):
        run = Sequences(decoder, [ids, torch.cat((ids[:32], ids[:9]))], format=kv_kind)
        run.step(s0=40)
        run.share(1, 0, 32)
        run.step(s0=29, s1=8)
        run.step(s0=1, s1=1)
        found.append(torch.cat((run.logits[0], run.logits[1][32:])))
    ours, right, plain = found
    torch.testing.assert_close(ours, right, rtol=0.0, atol=NEAR)
    assert (plain - ours).abs().max() > 5 * NEAR
