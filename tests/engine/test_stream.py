"""The contract of `Engine` and `Stream`, on every event loop."""

from __future__ import annotations

from typing import Any

import anyio
import pytest
from support import OpenEngine, Until, fake_runner, frontend_of, oracle, places

from asyncinfer import Completion, EngineClosed, SamplingParams
from asyncinfer.engine.frontend import Frontend
from asyncinfer.engine.intake import Intake
from asyncinfer.engine.loop_bridge import LoopBridge
from asyncinfer.engine.request import Request
from asyncinfer.engine.stream import BURST
from asyncinfer.testing import FakeModel, StepGate

pytestmark = pytest.mark.anyio


async def test_chunks_are_deltas_of_the_oracle(open_engine: OpenEngine) -> None:
    async with open_engine() as engine:
        want = oracle(engine, "hello", 20)
        async with engine.stream("hello", max_tokens=20, temperature=0.0) as stream:
            chunks = [chunk async for chunk in stream]
    assert [token for chunk in chunks for token in chunk.token_ids] == want
    assert [chunk.finish_reason for chunk in chunks] == [None] * (len(chunks) - 1) + ["length"]
    assert "".join(chunk.text for chunk in chunks) == bytes(
        token for token in want if token < 256
    ).decode(errors="replace")


async def test_await_gives_the_completion(open_engine: OpenEngine) -> None:
    async with open_engine() as engine:
        done = await engine.generate("hello", max_tokens=20, temperature=0.0)
        again = await engine.stream("hello", params=SamplingParams(max_tokens=20, temperature=0.0))
        want = oracle(engine, "hello", 20)
    assert isinstance(done, Completion)
    assert list(done.token_ids) == list(again.token_ids) == want
    assert done.finish_reason == "length"
    assert done.usage.prompt_tokens == 5
    assert done.usage.completion_tokens == 20
    assert 0 <= done.timings.queued <= done.timings.ttft <= done.timings.total


async def test_completion_after_iterating_half(open_engine: OpenEngine) -> None:
    async with open_engine() as engine:
        stream = engine.stream("hello", max_tokens=20, temperature=0.0)
        async for _ in stream:
            break
        done = await stream
        assert list(done.token_ids) == oracle(engine, "hello", 20)
        assert [chunk async for chunk in stream] == []


async def test_a_stream_that_is_paused_goes_on_when_it_is_awaited(
    open_engine: OpenEngine, until: Until
) -> None:
    async with open_engine() as engine:
        async with engine.stream("hello", max_tokens=20, temperature=0.0, buffer=2) as stream:
            await until(lambda: engine.stats().paused)
            with anyio.fail_after(30):
                done = await stream
        assert list(done.token_ids) == oracle(engine, "hello", 20)


async def test_a_stream_that_is_closed_amid_a_burst_gives_nothing_more(
    open_engine: OpenEngine, until: Until, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with open_engine() as engine:
        stream = engine.stream("hello", max_tokens=3 * BURST)
        async with stream:
            await until(lambda: stream.usage is not None)
            bridge = type(frontend_of(engine).bridge())
            checkpoint = bridge.checkpoint

            async def closed_meanwhile(self: LoopBridge) -> None:
                await checkpoint(self)
                await stream.aclose()

            monkeypatch.setattr(bridge, "checkpoint", closed_meanwhile)
            chunks = [chunk async for chunk in stream]
    assert len(chunks) == BURST - 1


async def test_many_streams_at_once(open_engine: OpenEngine) -> None:
    answers: dict[str, list[int]] = {}

    async def consume(engine: object, prompt: str) -> None:
        stream = engine.stream(prompt, max_tokens=30, temperature=0.0)  # type: ignore[attr-defined]
        answers[prompt] = [token async for chunk in stream for token in chunk.token_ids]

    async with open_engine() as engine:
        prompts = [f"prompt number {i}" for i in range(64)]
        async with anyio.create_task_group() as group:
            for prompt in prompts:
                group.start_soon(consume, engine, prompt)
        assert answers == {prompt: oracle(engine, prompt, 30) for prompt in prompts}
        assert engine.stats().generated_tokens == 64 * 30
        assert engine.stats().finished == 64


async def test_n_answers_are_independent_and_share_the_prompt(open_engine: OpenEngine) -> None:
    async with open_engine() as engine:
        done = await engine.generate("a prompt of some length", n=4, max_tokens=12, seed=3)
        single = await engine.generate("a prompt of some length", max_tokens=12, seed=3)
    assert [choice.index for choice in done.choices] == [0, 1, 2, 3]
    assert len({choice.token_ids for choice in done.choices}) == 4
    assert done.choices[0].token_ids == single.token_ids
    assert done.usage.completion_tokens == 48


async def test_stop_keeps_what_was_generated(open_engine: OpenEngine, gate: StepGate) -> None:
    async with open_engine() as engine:
        async with engine.stream("hello", max_tokens=1000, temperature=0.0) as stream:
            first = await anext(stream)
            stream.stop()
            stream.stop()
            rest = [chunk async for chunk in stream]
        tokens = [token for chunk in [first, *rest] for token in chunk.token_ids]
        assert rest[-1].finish_reason == "stopped"
        assert tokens == oracle(engine, "hello", 1000)[: len(tokens)]
        done = await stream
        assert done.finish_reason == "stopped"


async def test_stop_before_the_start(open_engine: OpenEngine, gate: StepGate) -> None:
    async with open_engine() as engine:
        gate.close()
        stream = engine.stream("hello", max_tokens=1000)
        stream.stop()
        ends: list[str | None] = []

        async def complete() -> None:
            ends.append((await stream).finish_reason)

        async with anyio.create_task_group() as group:
            group.start_soon(complete)
            # It has asked for the stop when it waits for the end.
            await anyio.wait_all_tasks_blocked()
            gate.open()
    assert ends == ["stopped"]


async def test_stop_string_shows_nothing_past_it(open_engine: OpenEngine) -> None:
    async with open_engine() as engine:
        free = await engine.generate("hello", max_tokens=200, temperature=0.0)
        cut = free.text[60:63]
        done = await engine.generate("hello", max_tokens=200, temperature=0.0, stop=cut)
    assert done.finish_reason == "stop"
    assert done.text == free.text[: free.text.index(cut)]
    assert done.usage.completion_tokens < 200


async def test_stop_token(open_engine: OpenEngine) -> None:
    async with open_engine() as engine:
        want = oracle(engine, "hello", 50)
        stop = want[20]
        done = await engine.generate("hello", max_tokens=50, temperature=0.0, stop_token_ids=[stop])
    assert done.finish_reason == "stop"
    assert list(done.token_ids) == want[: want.index(stop) + 1]


async def test_end_of_text_unless_ignored(open_engine: OpenEngine) -> None:
    async with open_engine(FakeModel(eos_every=10)) as engine:
        done = await engine.generate("hello", max_tokens=300, temperature=0.0)
        more = await engine.generate("hello", max_tokens=300, temperature=0.0, ignore_eos=True)
    assert done.finish_reason == "stop"
    assert len(done.token_ids) < 300 == len(more.token_ids)


async def test_logprobs(open_engine: OpenEngine) -> None:
    async with open_engine() as engine:
        done = await engine.generate(
            "hello there, this prompt spans blocks", max_tokens=5, logprobs=2, prompt_logprobs=0
        )
        runner = fake_runner(engine)
    prompt = list(b"hello there, this prompt spans blocks")
    assert [entry.token_id for entry in done.logprobs] == list(done.token_ids)
    assert done.logprobs[0] == runner.logprob(done.token_ids[0], len(prompt), 2)
    assert done.prompt_logprobs is not None
    assert done.prompt_logprobs[0] is None
    assert [entry.token_id for entry in done.prompt_logprobs[1:] if entry] == prompt[1:]


async def test_stream_costs_nothing_until_it_is_used(open_engine: OpenEngine) -> None:
    async with open_engine() as engine:
        for _ in range(100):
            engine.stream("hello")
        assert engine.stats().steps == 0
        assert places(engine) == 0


async def test_open_and_aclose(until: Until) -> None:
    from asyncinfer import Engine

    engine = await Engine.open(FakeModel())
    assert (await engine.generate("x", max_tokens=3)).usage.completion_tokens == 3
    await engine.aclose()
    await engine.aclose()
    with pytest.raises(EngineClosed, match="closed"):
        engine.stream("x")


async def test_a_clean_close_drains(open_engine: OpenEngine) -> None:
    async with open_engine(drain_timeout=30.0) as engine:
        stream = engine.stream("hello", max_tokens=100, temperature=0.0)
        await stream.__aenter__()
    assert len((await stream).token_ids) == 100


async def test_a_prefix_is_computed_once(open_engine: OpenEngine) -> None:
    prompt = "x" * 100
    async with open_engine() as engine:
        cold = await engine.generate(prompt, max_tokens=4, temperature=0.0)
        warm = await engine.generate(prompt, max_tokens=4, temperature=0.0)
        other = await engine.generate(prompt, max_tokens=4, temperature=0.0, cache_scope="b")
    assert cold.usage.cached_tokens == 0
    assert warm.usage.cached_tokens == 96
    assert other.usage.cached_tokens == 0
    assert cold.token_ids == warm.token_ids == other.token_ids


async def test_a_deadline_counts_from_a_start_that_was_cancelled(
    open_engine: OpenEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    admitted: list[Request] = []
    admit = Frontend.admit

    def noting(frontend: Frontend, *arguments: Any) -> Request:
        admitted.append(admit(frontend, *arguments))
        return admitted[-1]

    monkeypatch.setattr(Frontend, "admit", noting)
    # A thread prepares it, so that its start can be cancelled.
    monkeypatch.setattr(Intake, "_at_hand", lambda *_: False)
    async with open_engine() as engine:
        stream = engine.stream("hello", max_tokens=1, deadline=600.0)
        with anyio.CancelScope() as scope:
            scope.cancel()
            await anext(stream)
        await stream
    first, second = admitted
    assert (first.submitted, first.deadline) == (second.submitted, second.deadline)
