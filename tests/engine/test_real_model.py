"""The shipped model through the whole engine, against transformers on the same weights."""

from __future__ import annotations

import functools
import inspect
import itertools
import json.decoder
import math
import threading
from collections.abc import AsyncIterator
from typing import Any

import anyio
import pytest
import torch
from support import Until, core_of
from transformers import AutoModelForCausalLM

from asyncinfer import Engine
from asyncinfer.attention import gathered as gathered_module
from asyncinfer.attention import kv as kv_module
from asyncinfer.attention.contiguous import ContiguousKV
from asyncinfer.builtin import MODEL_PATH
from asyncinfer.runner.replay_executor import ReplayExecutor

pytestmark = [pytest.mark.anyio, pytest.mark.slow]

PROMPTS = [
    "def add(a, b):",
    "import os\n\n\nclass Reader:\n    def __init__(self, path):\n        self.path",
    "for i in range(10):\n    ",
    "def fibonacci(n):\n    if n < 2:\n        return n\n    return",
    "try:\n    import json\nexcept ImportError:",
    "# A comment about nothing in particular\nx = [1, 2, 3]\n",
    "class Stack:\n    def push(self, item):\n",
    "with open(filename, 'r') as f:\n    for line in f:\n",
]
NEW = 48


@pytest.fixture
def anyio_backend(request: pytest.FixtureRequest) -> Any:
    """The model does not know the loop: one test has both."""
    return getattr(request, "param", "asyncio")


@pytest.fixture(scope="module")
def peer() -> Any:
    model = AutoModelForCausalLM.from_pretrained(MODEL_PATH, dtype=torch.float32)
    return model.eval()


def greedy(peer: Any, prompt: list[int], count: int) -> list[int]:
    """transformers' own greedy answer, cut after the end of text. Tests share prompts."""
    key = tuple(prompt), count
    if key not in _ANSWERS:
        _ANSWERS[key] = _greedy(peer, prompt, count)
    return _ANSWERS[key]


_ANSWERS: dict[tuple[tuple[int, ...], int], list[int]] = {}


def _greedy(peer: Any, prompt: list[int], count: int) -> list[int]:
    with torch.inference_mode():
        out = peer.generate(
            torch.tensor([prompt]),
            attention_mask=torch.ones(1, len(prompt), dtype=torch.long),
            max_new_tokens=count,
            do_sample=False,
            pad_token_id=0,
        )
    return [int(token) for token in out[0, len(prompt) :]]


@pytest.fixture
async def engine() -> AsyncIterator[Engine]:
    async with Engine(device="cpu", drain_timeout=0.0, kv_bytes=1 << 26) as opened:
        yield opened


def encode(engine: Engine, text: str) -> list[int]:
    return core_of(engine).loaded.tokenizer.encode(text)


async def answers(engine: Engine, prompts: list[list[int]], **options: Any) -> list[list[int]]:
    """All prompts at once."""
    got: dict[int, list[int]] = {}

    async def one(i: int) -> None:
        done = await engine.generate(prompts[i], **options)
        got[i] = list(done.token_ids)

    async with anyio.create_task_group() as group:
        for i in range(len(prompts)):
            group.start_soon(one, i)
    return [got[i] for i in range(len(prompts))]


@pytest.mark.parametrize("anyio_backend", ["asyncio", "trio"], indirect=True)
async def test_it_writes_python(engine: Engine) -> None:
    prompts = ["def add(a, b):", "class Stack:\n    def push(self, item):"]
    texts = [(await engine.generate(prompt, max_tokens=64)).text for prompt in prompts]
    assert all(text.startswith("\n    ") for text in texts)
    for mark in ("def ", "return", "self.", "("):
        assert mark in texts[1]
    assert abs(texts[1].count("(") - texts[1].count(")")) <= 1


async def test_greedy_alone_and_batched(engine: Engine, peer: Any) -> None:
    prompts = [encode(engine, text) for text in PROMPTS]
    want = [greedy(peer, prompt, NEW) for prompt in prompts]
    alone = [
        list((await engine.generate(prompt, max_tokens=NEW, temperature=0.0)).token_ids)
        for prompt in prompts
    ]
    assert alone == want
    steps = engine.stats().steps
    batched = await answers(engine, prompts, max_tokens=NEW, temperature=0.0)
    assert batched == want
    # They really shared their steps.
    assert engine.stats().steps - steps < len(PROMPTS) * NEW / 2


async def test_greedy_with_chunked_prefill_and_prefix_hits(peer: Any) -> None:
    async with Engine(device="cpu", max_step_tokens=16, kv_bytes=1 << 26) as engine:
        long = encode(engine, "".join(PROMPTS))
        want = greedy(peer, long, NEW)
        cold = await engine.generate(long, max_tokens=NEW, temperature=0.0)
        assert list(cold.token_ids) == want
        assert engine.stats().steps >= len(long) / 16 + len(want) - 1
        warm = await engine.generate(long, max_tokens=NEW, temperature=0.0)
        assert list(warm.token_ids) == want
        assert warm.usage.cached_tokens == (len(long) - 1) // 16 * 16
        # A decode runs beside the chunks of another prompt.
        both = await answers(engine, [long[1:], long], max_tokens=NEW, temperature=0.0)
        assert both == [greedy(peer, long[1:], NEW), want]


@pytest.mark.parametrize("share", [0.0, 100.0])
async def test_greedy_under_preemption(
    peer: Any, share: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without and with copies, for which this cache is too small by itself."""
    monkeypatch.setattr(kv_module, "_CONTIGUOUS_SHARE", share)
    # Native code needs no copies.
    monkeypatch.setattr(gathered_module, "native_rows", lambda *_: None)
    copied, inner = [0], ContiguousKV.extended

    def counted(self: ContiguousKV, *arguments: Any) -> torch.Tensor | None:
        pages = inner(self, *arguments)
        copied[0] += pages is not None
        return pages

    monkeypatch.setattr(ContiguousKV, "extended", counted)
    # 24 blocks of 16 tokens: not enough for eight answers at once.
    per_block = 6 * 2 * 2 * 64 * 16 * 4
    async with Engine(device="cpu", kv_bytes=24 * per_block, prefix_cache=False) as engine:
        assert engine.stats().blocks_total <= 30
        prompts = [encode(engine, text) for text in PROMPTS]
        got = await answers(engine, prompts, max_tokens=80, temperature=0.0, ignore_eos=True)
        assert engine.stats().preemptions > 0
        assert copied[0] > 100 if share else not copied[0]
    for prompt, tokens in zip(prompts, got, strict=True):
        want = greedy(peer, prompt, 80)
        assert tokens[: len(want)] == want


async def test_a_seed_gives_the_same_tokens_everywhere(engine: Engine) -> None:
    prompt = encode(engine, PROMPTS[1] + PROMPTS[3])
    options: dict[str, Any] = {
        "max_tokens": 32,
        "temperature": 0.9,
        "top_p": 0.95,
        "seed": 7,
        "ignore_eos": True,
    }
    alone = list((await engine.generate(prompt, **options)).token_ids)
    hit = await engine.generate(prompt, **options)
    assert hit.usage.cached_tokens > 0
    assert list(hit.token_ids) == alone
    crowd = [encode(engine, text) for text in PROMPTS * 8][:63]
    got: list[list[int]] = []

    async def ours() -> None:
        got.append(list((await engine.generate(prompt, **options)).token_ids))

    async with anyio.create_task_group() as group:
        for i, other in enumerate(crowd):
            group.start_soon(
                lambda other=other, i=i: engine.generate(
                    other, max_tokens=40, temperature=1.0, seed=i, ignore_eos=True
                )
            )
        group.start_soon(ours)
    assert got == [alone]


async def test_a_seed_survives_preemption() -> None:
    per_block = 6 * 2 * 2 * 64 * 16 * 4
    options: dict[str, Any] = {"max_tokens": 80, "temperature": 0.9, "ignore_eos": True}
    async with Engine(device="cpu", kv_bytes=24 * per_block) as engine:
        prompts = [encode(engine, text) for text in PROMPTS]
        alone = [
            list((await engine.generate(prompt, seed=5, **options)).token_ids) for prompt in prompts
        ]
        assert engine.stats().preemptions == 0
        together = await answers(engine, prompts, seed=5, **options)
        assert engine.stats().preemptions > 0
    assert together == alone


async def test_perplexity_through_prompt_logprobs(engine: Engine, peer: Any) -> None:
    token_ids = encode(engine, inspect.getsource(json.decoder))[:1500]
    done = await engine.generate(token_ids, max_tokens=1, prompt_logprobs=0)
    assert done.prompt_logprobs is not None
    ours = [entry.logprob for entry in done.prompt_logprobs if entry is not None]
    assert len(ours) == len(token_ids) - 1
    with torch.inference_mode():
        batch = torch.tensor([token_ids])
        loss = peer(batch, labels=batch).loss.item()
    perplexity, theirs = math.exp(-sum(ours) / len(ours)), math.exp(loss)
    assert f"{perplexity:.4g}" == f"{theirs:.4g}"


async def test_logprobs_are_the_models_own(engine: Engine, peer: Any) -> None:
    prompt = encode(engine, PROMPTS[0])
    done = await engine.generate(
        prompt, max_tokens=8, temperature=0.7, top_k=5, seed=1, logprobs=3, ignore_eos=True
    )
    with torch.inference_mode():
        logits = peer(torch.tensor([prompt + list(done.token_ids)])).logits[0].double()
    own = torch.log_softmax(logits, -1)
    for i, entry in enumerate(done.logprobs):
        row = own[len(prompt) - 1 + i]
        assert entry.token_id == done.token_ids[i]
        assert entry.logprob == pytest.approx(row[entry.token_id].item(), abs=1e-4)
        assert entry.rank == int((row > row[entry.token_id]).sum()) + 1
        assert [token for token, _ in entry.top] == row.topk(3).indices.tolist()


async def test_chat(engine: Engine) -> None:
    done = await engine.generate(
        [{"role": "user", "content": "Write a function that adds two numbers."}], max_tokens=16
    )
    assert done.usage.prompt_tokens > 5
    assert done.usage.completion_tokens <= 16


async def test_the_device_has_no_memory_for_a_step(
    engine: Engine, until: Until, monkeypatch: pytest.MonkeyPatch
) -> None:
    # faults 23, 24: with the real runner; a prompt's step and decode steps.
    prompts = [encode(engine, text) for text in PROMPTS]
    options: dict[str, Any] = {"max_tokens": 24, "temperature": 0.7, "top_p": 0.9}
    alone = [(await answers(engine, [prompt], seed=3, **options))[0] for prompt in prompts]
    forward, calls = ReplayExecutor.forward, itertools.count()
    begun, all_there = threading.Event(), threading.Event()

    def cramped(self: ReplayExecutor, *arguments: Any) -> torch.Tensor:
        call = next(calls)
        if call == 0:
            # Of a request before the others, all of which are there for their first step.
            begun.set()
            assert all_there.wait(120)
        if call in (1, 5, 12):
            raise torch.OutOfMemoryError("planted")
        return forward(self, *arguments)

    async def check() -> None:
        assert await answers(engine, prompts, seed=3, **options) == alone

    monkeypatch.setattr(ReplayExecutor, "forward", cramped)
    async with anyio.create_task_group() as group:
        group.start_soon(functools.partial(engine.generate, "first", max_tokens=1))
        await until(begun.is_set)
        group.start_soon(check)
        await until(lambda: engine.stats().waiting == len(prompts))
        all_there.set()
    assert next(calls) > 24
    assert engine.stats().preemptions > 0
