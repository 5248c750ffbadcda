"""Embeddings and scores have the numbers of transformers, beside whatever else is computed."""

from __future__ import annotations

import threading
import tracemalloc
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from sys import getsizeof
from typing import Any

import anyio
import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

from asyncinfer import Embeddings, Engine, InvalidRequest, Overloaded, SyncEngine
from asyncinfer.builtin import MODEL_PATH
from asyncinfer.testing import FakeModel, ScriptedModel

pytestmark = pytest.mark.asyncio

TEXTS = ["a", "The quick brown fox jumps over the lazy dog. " * 6, "Hello, world"]
BLOCK = 16


@pytest.fixture(scope="module")
def states() -> dict[str, torch.Tensor]:
    """Of each text, float32 `[tokens, hidden]`, after the final norm."""
    model = AutoModelForCausalLM.from_pretrained(MODEL_PATH, dtype=torch.float32)
    with SyncEngine() as engine:
        ids = {text: engine.tokenizer.encode(text) for text in TEXTS}
    with torch.inference_mode():
        return {
            text: model.model(torch.tensor([each])).last_hidden_state[0]
            for text, each in ids.items()
        }


@contextmanager
def traced_peak() -> Iterator[Callable[[], int]]:
    """Yields a function that gives the most bytes that Python's objects took."""
    tracemalloc.start()
    try:
        yield lambda: peak
    finally:
        peak = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()


def wanted(states: dict[str, torch.Tensor], pooling: str) -> np.ndarray:
    pooled = [states[text].mean(0) if pooling == "mean" else states[text][-1] for text in TEXTS]
    return torch.stack(pooled).numpy()


@pytest.mark.parametrize("pooling", ["last", "mean"])
@pytest.mark.parametrize("deterministic", [False, True])
async def test_embeddings_are_those_of_transformers(
    states: dict[str, torch.Tensor], pooling: str, deterministic: bool
) -> None:
    """In chunks of a few tokens, twice (the second time the prefix cache has them), with others
    who decode meanwhile."""
    want = wanted(states, pooling)
    async with Engine(max_step_tokens=24, deterministic=deterministic) as engine:
        async with engine.stream([5, 6], max_tokens=200, ignore_eos=True) as other:
            await anext(other)
            for _ in range(2):
                done = await engine.embed(TEXTS, pooling=pooling, normalize=False)
                assert done.vectors.dtype == np.float32
                np.testing.assert_allclose(done.vectors, want, rtol=0, atol=2e-4)
                assert done.prompt_tokens == sum(map(len, states.values()))
        whole = await engine.embed(TEXTS, pooling=pooling)
        lengths = np.linalg.norm(want, axis=1, keepdims=True)
        np.testing.assert_allclose(whole.vectors, want / lengths, rtol=0, atol=1e-4)
        few = await engine.embed(TEXTS, pooling=pooling, dimensions=8)
        cut = want[:, :8] / np.linalg.norm(want[:, :8], axis=1, keepdims=True)
        np.testing.assert_allclose(few.vectors, cut, rtol=0, atol=1e-3)
        stats = engine.stats()
        assert stats.running == stats.waiting == 0


async def test_embeddings_survive_preemption(states: dict[str, torch.Tensor]) -> None:
    """A pool that is too small for all of them at once."""
    want = wanted(states, "mean")
    async with Engine(kv_bytes=3 << 19, max_context=256, max_step_tokens=16) as engine:
        found: list[Embeddings] = []

        async def ask() -> None:
            found.append(await engine.embed(TEXTS * 3, pooling="mean", normalize=False))

        async with anyio.create_task_group() as tasks:
            for _ in range(3):
                tasks.start_soon(ask)
            tasks.start_soon(lambda: engine.generate([7], max_tokens=200, n=4, ignore_eos=True))
        for each in found:
            np.testing.assert_allclose(each.vectors, np.concatenate([want] * 3), rtol=0, atol=2e-4)
        assert engine.stats().preemptions > 0


async def test_scores_are_the_prompt_logprobs_of_the_whole() -> None:
    prompt, rest = (
        "The capital of Italy is a city with a river. It is called",
        [" Rome", " x y", "!"],
    )
    async with Engine() as engine:
        scores = await engine.score(prompt, rest)
        before = engine.tokenizer.encode(prompt)
        for text, score in zip(rest, scores, strict=True):
            assert list(score.token_ids) == engine.tokenizer.encode(text, add_special_tokens=False)
            ids = [*before, *score.token_ids]
            whole = await engine.generate(ids, max_tokens=1, prompt_logprobs=0)
            assert whole.prompt_logprobs is not None
            entries = whole.prompt_logprobs[len(before) :]
            assert score.logprobs == pytest.approx(
                [entry.logprob for entry in entries if entry is not None], abs=1e-4
            )
            assert score.logprob == pytest.approx(sum(score.logprobs))
            assert score.greedy == all(entry is not None and entry.rank == 1 for entry in entries)
        greedy = await engine.generate(prompt, max_tokens=3, temperature=0.0, ignore_eos=True)
        (likeliest,) = await engine.score(prompt, [list(greedy.token_ids)])
        assert likeliest.greedy


async def test_a_prompt_is_computed_once_for_all_its_continuations() -> None:
    prompt = list(range(20, 20 + 10 * BLOCK))
    async with Engine(FakeModel(), block_size=BLOCK) as engine:
        await engine.score(prompt, [[number + 1] for number in range(8)])
        stats = engine.stats()
        # The last token of the prompt is each one's own, and so its block is.
        assert stats.prompt_tokens == 8 * (len(prompt) + 1)
        assert stats.cached_tokens == 7 * 9 * BLOCK


async def test_prompts_that_wait_are_not_made() -> None:
    """Thousands of continuations of a long prompt were as many lists of its tokens at once."""
    prompt, rest = [5] * 1000, [[6]] * 300
    async with Engine(FakeModel(blocks=512), max_requests=2) as engine:
        await engine.score(prompt, rest[:2])
        with traced_peak() as peak:
            await engine.score(prompt, rest)
    assert peak() < getsizeof(prompt) * len(rest) / 2


async def test_thousands_of_vectors_are_made_beside_the_event_loop(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    threads, norm = [], np.linalg.norm

    def noted(*args: Any, **options: Any) -> Any:
        threads.append(threading.current_thread())
        return norm(*args, **options)

    monkeypatch.setattr(np.linalg, "norm", noted)
    async with Engine() as engine:
        await engine.embed(["a"] * 65)
        await engine.embed(["a"])
    assert threads[0] is not threading.main_thread()
    assert threads[1] is threading.main_thread()


async def test_more_texts_than_an_engine_holds_requests() -> None:
    async with Engine(max_requests=3) as engine:
        assert len((await engine.embed(["a", "b"] * 4)).vectors) == 8
        assert len(await engine.score("a", ["b"] * 8)) == 8
        assert engine.stats().refused == 0


async def test_texts_wait_for_the_room_that_others_take() -> None:
    """As long as some of them are under way: nothing else says when there is room."""
    texts = [f"text {index}" for index in range(16)]
    async with Engine(max_requests=8) as engine:
        alone = (await engine.embed(texts)).vectors
        async with engine.stream("hello", max_tokens=400, ignore_eos=True, buffer=4) as stream:
            await anext(stream)
            beside = (await engine.embed(texts)).vectors
            np.testing.assert_allclose(beside, alone, atol=1e-4)
            assert len(await engine.score("hello", texts)) == 16
            async with engine.stream("hello", n=7, max_tokens=400, ignore_eos=True, buffer=4):
                with pytest.raises(Overloaded):
                    await engine.embed(texts)


async def test_without_an_event_loop() -> None:
    with SyncEngine() as engine:
        assert engine.embed(["a", [5, 6]]).vectors.shape[0] == 2
        assert len(engine.score("a", ["b", [5, 6]])) == 2


async def test_misuse() -> None:
    async with Engine() as engine:
        for options in ({"pooling": "max"}, {"normalize": 1}, {"dimensions": 0}):
            with pytest.raises(InvalidRequest, match=next(iter(options))):
                await engine.embed(["a"], **options)  # type: ignore[arg-type]
        with pytest.raises(InvalidRequest, match="dimensions"):
            await engine.embed(["a"], dimensions=1 << 20)
        with pytest.raises(InvalidRequest, match="texts"):
            await engine.embed([])
        for texts, place in (
            (["a", []], "texts[1]"),
            (["a", 5], "texts[1]"),
            ([[1], [1, 1 << 20]], "texts[1][1]"),
            (["a", "b " * 3000], "texts[1]"),
        ):
            with pytest.raises(InvalidRequest) as refused:
                await engine.embed(texts)
            assert refused.value.field == place
        with pytest.raises(InvalidRequest, match=r"continuations\[1\]"):
            await engine.score("a", ["b", ""])
        with pytest.raises(InvalidRequest, match=r"continuations\[1\]='\\udc80'.* at offset 0"):
            await engine.score("a", ["b", "\udc80"])
        with pytest.raises(InvalidRequest, match=r"continuations\[1\]\[0\]=1048576"):
            await engine.score("a", ["b", [1 << 20]])
        with pytest.raises(InvalidRequest, match=r"continuations\[0\]=<3003 tokens>"):
            await engine.score("a", ["b " * 3000])
        with pytest.raises(InvalidRequest, match="must be a list"):
            await engine.score("a", "b")
        assert engine.stats().running == engine.stats().waiting == 0
    async with Engine(FakeModel()) as engine:
        with pytest.raises(InvalidRequest, match="no hidden states"):
            await engine.embed(["a"])


async def test_the_model_says_what_it_computes_in() -> None:
    for dtype in ("float32", "bfloat16"):
        async with Engine(dtype=dtype) as engine:
            assert engine.model.dtype == dtype
    async with Engine(device="cpu") as engine:
        assert engine.model.dtype == "float32"
    async with Engine(FakeModel()) as engine:
        assert engine.model.dtype == "auto"


async def test_nothing_is_drawn() -> None:
    async with Engine() as engine:
        await engine.embed(TEXTS)
        await engine.score("a", ["b", "c"])
        async with engine.pin("a long prompt " * 8):
            assert engine.stats().generated_tokens == 0


@pytest.mark.parametrize(
    "options",
    [
        {"n": 2},
        {"json_schema": {"type": "object"}},
        {"guidance_scale": 2.0, "negative_prompt": "x"},
        {"stop": "x", "logprobs": 1, "stream_interval": 4},
        {"stop_regex": "x", "repetition_stop": (4, 4)},
        {"temperature": 1.0, "seed": 1},
    ],
)
async def test_an_answer_of_no_tokens(options: dict[str, Any]) -> None:
    """Whatever would restrict or steer it."""
    async with Engine() as engine:
        done = await engine.generate("import os", max_tokens=0, prompt_logprobs=0, **options)
        assert (done.text, done.token_ids, done.finish_reason) == ("", (), "length")
        assert done.usage.completion_tokens == 0
        assert done.prompt_logprobs is not None
        whole = await engine.generate("import os", max_tokens=1, prompt_logprobs=0)
        assert whole.prompt_logprobs is not None
        for one, other in zip(done.prompt_logprobs[1:], whole.prompt_logprobs[1:], strict=True):
            assert one is not None
            assert other is not None
            assert one.logprob == pytest.approx(other.logprob, abs=1e-4)
        chunks = [chunk async for chunk in engine.stream("import os", max_tokens=0)]
        assert [(chunk.text, chunk.finish_reason) for chunk in chunks] == [("", "length")]
        assert engine.stats().running == engine.stats().waiting == 0


async def test_a_conversation_goes_on_after_it() -> None:
    async with Engine(ScriptedModel(["Nobody draws this.", "Rome."])) as engine:
        async with engine.session() as chat:
            assert (await chat.send("The capital of Italy?", max_tokens=0)).text == ""
            chat.rewind(1)
            assert (await chat.send()).text == "Rome."
