"""LoRA adapters in an engine that serves: the tokens of the merged model, whatever else is in the
batch; names, lifetimes and bounds."""

from __future__ import annotations

import gc
from pathlib import Path
from typing import Any

import anyio
import anyio.lowlevel
import pytest
import torch
from adapters.embedded import CONFIG, merged_model, random_tensors
from support import core_of, places

from asyncinfer import Completion, Engine, InvalidRequest, ModelLoadError
from asyncinfer.adapters import AdapterPool
from asyncinfer.testing import FakeModel

pytestmark = pytest.mark.anyio

PROMPTS = [
    "def add(a, b):",
    "import os\n\n\nclass Reader:\n    def __init__(self, path):\n        self.path",
    "for i in range(10):\n    ",
    "# A comment about nothing in particular\nx = [1, 2, 3]\n",
]
OPTIONS: dict[str, Any] = {
    "max_tokens": 16,
    "temperature": 0.0,
    "ignore_eos": True,
    "logprobs": 0,
}
CPU: dict[str, Any] = {"device": "cpu", "cpu_threads": 1, "max_context": 256}


@pytest.fixture
def anyio_backend() -> str:
    return "asyncio"


def pool_of(engine: Engine) -> AdapterPool:
    pool = core_of(engine).adapters.pool
    assert pool is not None
    return pool


async def answers(engine: Engine, adapters: list[str | None], **options: Any) -> list[Completion]:
    """An answer to each prompt with each adapter, all at once."""
    done: dict[int, Completion] = {}

    async def one(place: int, prompt: str, adapter: str | None) -> None:
        given = {**OPTIONS, **options}
        done[place] = await engine.generate(prompt, adapter=adapter, **given)

    async with anyio.create_task_group() as group:
        for place in range(len(adapters) * len(PROMPTS)):
            prompt = PROMPTS[place % len(PROMPTS)]
            group.start_soon(one, place, prompt, adapters[place // len(PROMPTS)])
    return [done[place] for place in sorted(done)]


def alike(got: list[Completion], right: list[Completion]) -> None:
    for ours, theirs in zip(got, right, strict=True):
        for mine, other in zip(ours.choices, theirs.choices, strict=True):
            assert mine.token_ids == other.token_ids
            logprobs = torch.tensor([token.logprob for token in mine.logprobs])
            others = torch.tensor([token.logprob for token in other.logprobs])
            torch.testing.assert_close(logprobs, others, rtol=0, atol=1e-3)


@pytest.fixture(scope="module")
def tensors() -> dict[str, dict[str, torch.Tensor]]:
    return {
        "a": random_tensors(1, rank=4),
        "b": random_tensors(2, rank=16, modules=("self_attn.q_proj", "self_attn.v_proj")),
        "c": random_tensors(3, rank=1, modules=("mlp.down_proj",)),
    }


@pytest.fixture(scope="module")
def merged(
    tensors: dict[str, dict[str, torch.Tensor]], tmp_path_factory: pytest.TempPathFactory
) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("merged")
    return {
        name: merged_model(folder / name, its, rslora=name == "b") for name, its in tensors.items()
    }


async def load_all(engine: Engine, tensors: dict[str, dict[str, torch.Tensor]]) -> None:
    for name, its in tensors.items():
        await engine.adapters.load(name, its, config={**CONFIG, "use_rslora": name == "b"})


@pytest.mark.parametrize(
    "config",
    [
        {},
        # Prompts in pieces, and more requests than there is room for: they are preempted.
        {"max_step_tokens": 16, "kv_bytes": 8 * 16 * 6 * 2 * 128 * 4, "max_context": 128},
        {"deterministic": True, "max_running": 6},
    ],
    ids=["plain", "chunks-and-preemption", "deterministic"],
)
async def test_answers_are_those_of_the_merged_models(
    config: dict[str, Any],
    tensors: dict[str, dict[str, torch.Tensor]],
    merged: dict[str, Path],
) -> None:
    count = 1 if config.get("deterministic") else 2
    right = []
    for name in ("a", "b", "c", None):
        async with Engine(merged.get(name or ""), **CPU) as engine:
            right += await answers(engine, [None], n=count)
    async with Engine(**{**CPU, **config}) as engine:
        await load_all(engine, tensors)
        cold = await answers(engine, ["a", "b", "c", None], n=count)
        warm = await answers(engine, ["a", "b", "c", None], n=count)
        stats = engine.stats()
    assert stats.adapters == 3
    alike(cold, right)
    alike(warm, right)
    if "kv_bytes" in config:
        assert stats.preemptions
    elif not config:
        assert any(answer.usage.cached_tokens for answer in warm[4:8])
    assert len({answer.text for answer in right}) > len(PROMPTS)


async def test_drafts_change_no_answer_of_an_adapter(
    tensors: dict[str, dict[str, torch.Tensor]],
) -> None:
    async with Engine(**CPU, prefix_cache=False) as engine:
        await load_all(engine, tensors)
        plain = await answers(engine, ["a", "b", None])
    async with Engine(**CPU, proposers=["suffix"]) as engine:
        await load_all(engine, tensors)
        # All but one token of what the adapter's model says, and of what the plain model says.
        right = [*plain[0].token_ids[:6], 7, *plain[0].token_ids[7:]]
        for prediction in (right, plain[8].token_ids):
            drafted = await answers(engine, ["a", "b", None], prediction=prediction)
            alike(drafted, plain)
        methods = {drafts.method: sum(drafts.accepted) for drafts in engine.stats().drafts}
    assert methods["prediction"] > 8
    # What the first round said comes again in the second.
    assert methods["suffix"] > 8


async def test_a_deterministic_engine_gives_the_same_bits_in_any_batch(
    tensors: dict[str, dict[str, torch.Tensor]],
) -> None:
    async with Engine(**CPU, deterministic=True, prefix_cache=False) as engine:
        await load_all(engine, tensors)
        alone = [await engine.generate(p, adapter="a", **OPTIONS) for p in PROMPTS[:2]]
        together = await answers(engine, ["a", "b", None])
    for first, second in zip(alone, together, strict=False):
        assert first.choices == second.choices


@pytest.mark.parametrize("weights", ["int8", "int4"])
async def test_quantised_weights_take_adapters(
    weights: str, tensors: dict[str, dict[str, torch.Tensor]]
) -> None:
    async with Engine(**CPU, weights=weights) as engine:
        before = await answers(engine, [None])
        await load_all(engine, tensors)
        after = await answers(engine, ["a", None])
    alike(after[4:], before)
    assert [a.token_ids for a in after[:4]] != [b.token_ids for b in before]


async def test_an_unknown_adapter_is_refused_before_any_state_exists(
    tensors: dict[str, dict[str, torch.Tensor]],
) -> None:
    async with Engine(**CPU) as engine:
        with pytest.raises(InvalidRequest, match=r"adapter='x': must be .* loaded: none"):
            engine.stream("a", adapter="x")
        await load_all(engine, tensors)
        with pytest.raises(InvalidRequest, match=r"adapter='x': must be .* loaded: a, b, c"):
            engine.stream("a", adapter="x")
        with pytest.raises(InvalidRequest, match="adapter=7: must be a string"):
            engine.stream("a", adapter=7)  # type: ignore[arg-type]
        stream = engine.stream("a", adapter="b")
        await engine.adapters.unload("b")
        with pytest.raises(InvalidRequest, match="loaded: a, c"):
            await stream
        with pytest.raises(InvalidRequest, match=r"name='b': must be .* loaded: a, c"):
            await engine.adapters.unload("b")
        assert places(engine) == 0
        assert [info.requests for info in engine.adapters.list()] == [0, 0]


async def test_a_reloaded_adapter_is_another(
    tensors: dict[str, dict[str, torch.Tensor]],
) -> None:
    prompt = PROMPTS[1] * 3
    async with Engine(**CPU) as engine:
        await engine.adapters.load("x", tensors["a"], config=CONFIG)
        first = await engine.generate(prompt, adapter="x", **OPTIONS)
        again = await engine.generate(prompt, adapter="x", **OPTIONS)
        assert again.usage.cached_tokens
        assert again.token_ids == first.token_ids
        await engine.adapters.load("x", tensors["b"], config=CONFIG)
        other = await engine.generate(prompt, adapter="x", **OPTIONS)
        assert not other.usage.cached_tokens
        assert other.token_ids != first.token_ids
        plain = await engine.generate(prompt, **OPTIONS)
        assert not plain.usage.cached_tokens
        assert [info.rank for info in engine.adapters.list()] == [16]


async def test_requests_keep_what_they_began_with(
    tensors: dict[str, dict[str, torch.Tensor]],
) -> None:
    async with Engine(**CPU) as engine:
        await load_all(engine, tensors)
        options = {**OPTIONS, "max_tokens": 100}
        right = await engine.generate(PROMPTS[0], adapter="a", **options)
        async with engine.stream(PROMPTS[0], adapter="a", buffer=1, **options) as stream:
            texts = [(await anext(stream)).text]
            held = engine.stats().adapter_bytes
            await engine.adapters.unload("a")
            # Another takes its name, and yet another a slot.
            await engine.adapters.load("a", tensors["b"], config=CONFIG)
            await engine.adapters.load("d", tensors["c"], config=CONFIG)
            assert engine.stats().adapter_bytes > held
            texts += [chunk.text async for chunk in stream]
        assert "".join(texts) == right.text
        for name in ("a", "b", "c", "d"):
            await engine.adapters.unload(name)
        while engine.stats().adapter_bytes:
            await anyio.lowlevel.checkpoint()
        assert pool_of(engine).layers == {}
        assert engine.adapters.list() == ()


async def test_a_load_that_is_cancelled_leaves_nothing(
    tensors: dict[str, dict[str, torch.Tensor]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Cancelled while it is read, and while it waits for another."""
    async with Engine(**CPU) as engine:
        pool = pool_of(engine)
        reached, go_on, load = anyio.Event(), anyio.Event(), pool.load
        loaded = []

        def slow(adapter: Any) -> Any:
            try:
                anyio.from_thread.run_sync(reached.set, token=token)
                anyio.from_thread.run(go_on.wait, token=token)
                return load(adapter)
            finally:
                loaded.append(adapter)

        token = anyio.lowlevel.current_token()
        monkeypatch.setattr(pool, "load", slow)
        async with anyio.create_task_group() as group:
            group.start_soon(lambda: engine.adapters.load("x", tensors["a"], config=CONFIG))
            group.start_soon(lambda: engine.adapters.load("y", tensors["b"], config=CONFIG))
            await reached.wait()
            group.cancel_scope.cancel()
        go_on.set()
        while not loaded or pool.bytes:
            await anyio.sleep(0.001)
        assert engine.adapters.list() == ()


async def test_loads_under_traffic_leak_nothing(
    tensors: dict[str, dict[str, torch.Tensor]],
) -> None:
    rounds = 20
    async with Engine(**CPU, max_adapters=3) as engine:

        async def traffic(scope: anyio.CancelScope) -> None:
            with scope:
                while True:
                    try:
                        await engine.generate(PROMPTS[0], adapter="x", max_tokens=4)
                    except InvalidRequest:
                        await engine.generate(PROMPTS[2], max_tokens=2)

        async with anyio.create_task_group() as group:
            scopes = [anyio.CancelScope() for _ in range(3)]
            for scope in scopes:
                group.start_soon(traffic, scope)
            for number in range(rounds):
                its = tensors["abc"[number % 3]]
                while True:
                    try:
                        await engine.adapters.load("x", its, config=CONFIG)
                        break
                    except ModelLoadError:
                        # Requests still have the ones before.
                        await anyio.lowlevel.checkpoint()
                await anyio.lowlevel.checkpoint()
                if number % 2:
                    await engine.adapters.unload("x")
            for scope in scopes:
                scope.cancel()
        # A place is given back before the counters of its step are told.
        while places(engine) or engine.stats().running or engine.stats().adapter_bytes:
            await anyio.sleep(0.001)
        gc.collect()
        pool = pool_of(engine)
        assert pool.layers == {}
        assert pool.bytes == 0
        stats = engine.stats()
        assert stats.blocks_free + stats.blocks_cached == stats.blocks_total


async def test_bounds(tensors: dict[str, dict[str, torch.Tensor]]) -> None:
    async with Engine(**CPU, max_adapters=1, max_adapter_rank=4) as engine:
        load = engine.adapters.load
        with pytest.raises(ModelLoadError, match=r"lora_A.*: rank 16: max_adapter_rank=4"):
            await load("b", tensors["b"], config=CONFIG)
        info = await load("a", tensors["a"], config={**CONFIG, "base_model_name_or_path": "o/m"})
        assert (info.name, info.rank, info.base_model) == ("a", 4, "o/m")
        assert info.bytes == 6 * 4 * 4 * (1280 + 512 + 1792 + 896)
        with pytest.raises(ModelLoadError, match="max_adapters=1 are loaded"):
            await load("c", tensors["c"], config=CONFIG)
        for name in ("", "x" * 257, 3):
            with pytest.raises(InvalidRequest, match="name="):
                await load(name, tensors["c"], config=CONFIG)  # type: ignore[arg-type]
        with pytest.raises(InvalidRequest, match="source=7"):
            await load("c", 7)  # type: ignore[arg-type]
    async with Engine(**CPU, adapter_bytes=1000) as engine:
        with pytest.raises(ModelLoadError, match="adapter_bytes=1000 has room for 0 adapters"):
            await engine.adapters.load("a", tensors["a"], config=CONFIG)
    async with Engine(**CPU, max_adapters=0) as engine:
        with pytest.raises(ModelLoadError, match="max_adapters=0"):
            await engine.adapters.load("a", tensors["a"], config=CONFIG)


async def test_a_model_without_adapters_says_so() -> None:
    async with Engine(FakeModel()) as engine:
        assert engine.adapters.list() == ()
        with pytest.raises(InvalidRequest, match="takes no adapters"):
            await engine.adapters.load("a", {}, config=CONFIG)
        with pytest.raises(InvalidRequest, match="takes no adapters"):
            engine.stream("a", adapter="a")
