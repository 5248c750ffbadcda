"""`asyncinfer bench host`, small: the counts are right. Times are not looked at."""

from __future__ import annotations

import asyncio
import itertools
import pkgutil
import time
from collections.abc import Awaitable, Callable

import anyio
import pytest
from benchmarks.host_steps import measure_runner, measure_scheduler

from asyncinfer import EngineConfig
from asyncinfer.bench import BenchError, HostOptions, available_loops, measure_host
from asyncinfer.bench.host_streams import measure_streams
from asyncinfer.bench.host_tokens import measure_tokens, staggered_prompt
from asyncinfer.bench.loops import run_on
from asyncinfer.testing import ClockedModel, FakeModel, InlineEngine, Step


def test_scheduler_steps_are_counted() -> None:
    cost = measure_scheduler(running=8, steps=20, warmup=3)
    assert (cost.running, cost.steps, cost.tokens) == (8, 20, 160)
    assert cost.first.count == cost.second.count == cost.both.count == 20
    assert cost.both.mean == pytest.approx(cost.first.mean + cost.second.mean)
    assert cost.both.mean > 0


def test_steps_of_the_runner_are_counted() -> None:
    cost = measure_runner(running=8, steps=20, warmup=3)
    assert (cost.running, cost.steps, cost.tokens) == (8, 20, 160)
    assert cost.first.count == cost.second.count == cost.both.count == 20
    assert cost.both.mean == pytest.approx(cost.first.mean + cost.second.mean)


def test_prompts_differ_from_the_first_block_on() -> None:
    prompts = [tuple(staggered_prompt(index)[:16]) for index in range(2000)]
    assert len(set(prompts)) == 2000


@pytest.mark.parametrize("loop", available_loops())
def test_every_token_is_held_before_it_is_counted(loop: str) -> None:
    cost = run_on(loop, measure_tokens, 8, 20, 3)
    assert (cost.running, cost.steps, cost.tokens) == (8, 20, 160)
    assert cost.host == pytest.approx(cost.engine + cost.loop)
    assert cost.engine > 0
    assert cost.loop > 0
    assert cost.runner > 0


def test_a_batch_that_is_never_full_is_no_measurement(monkeypatch: pytest.MonkeyPatch) -> None:
    def halved(**options: int) -> EngineConfig:
        return EngineConfig(**{**options, "max_running": 2})

    monkeypatch.setattr("asyncinfer.bench.host_tokens.EngineConfig", halved)
    with pytest.raises(BenchError, match="only 0 steps had all 4 requests"):
        run_on("asyncio", measure_tokens, 4, 10, 1)


@pytest.mark.parametrize("loop", available_loops())
def test_streams_get_what_was_asked_for(loop: str) -> None:
    # Long beside what a busy machine may hold an event loop up for.
    load = run_on(loop, measure_streams, 20, 2000.0, 1.5)
    assert load.streams == 20
    assert load.tokens == 3000
    assert load.latency.count == load.tokens
    # Never faster than asked for; how much slower is the machine's affair.
    assert 0 < load.rate <= 2000.0 * 1.5
    assert load.rate == pytest.approx(load.tokens / load.seconds)


@pytest.mark.parametrize(
    ("measure", "waits", "number", "ends"),
    [
        (measure_tokens, "host_tokens._LockStep._wait", 2, "host_tokens._LockStep.hold"),
        (measure_tokens, "gates.StartingLine.wait", 1, "gates.StartingLine.enter"),
        (measure_streams, "gates.StartingLine.wait", 1, "gates.StartingLine.enter"),
    ],
)
def test_a_run_that_is_left_ends(
    measure: Callable[..., Awaitable[object]],
    waits: str,
    number: int,
    ends: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The wait of this number no longer waits for consumers that a Ctrl-C has ended."""
    calls = itertools.count(1)
    before = pkgutil.resolve_name(f"asyncinfer.bench.{waits}")

    async def leave() -> None:
        loop = asyncio.get_running_loop()
        with anyio.CancelScope() as scope:

            def wait(self: object) -> None:
                if next(calls) == number:
                    loop.call_soon_threadsafe(scope.cancel)
                before(self)

            monkeypatch.setattr(f"asyncinfer.bench.{waits}", wait)
            monkeypatch.setattr(f"asyncinfer.bench.{ends}", lambda *rest: None)
            await measure(8)
        assert scope.cancelled_caught

    run_on("asyncio", leave)


def test_the_whole_command_has_its_figures() -> None:
    options = HostOptions(
        loops=("asyncio",), running=4, steps=5, streams=10, rate=500, seconds=1.0, repeat=1
    )
    told: list[str] = []
    figures = measure_host(options, told.append).figures()
    names = [figure.name for figure in figures]
    assert len(names) == len(set(names)) == 10
    assert [figure.target for figure in figures if figure.target] == [1.0, 8.0, 0.99 * 500]
    assert told


def test_a_runner_is_clocked_where_it_runs() -> None:
    spent = 0.0

    def work(phase: str, plan: Step) -> None:
        nonlocal spent
        began = time.thread_time()
        while time.thread_time() - began < 0.002:
            pass
        spent += time.thread_time() - began

    fake = FakeModel(gate=work)
    model = ClockedModel(fake)
    engine = InlineEngine(model)
    before = time.thread_time()
    stream = engine.submit("prompt", max_tokens=20, temperature=0.0)
    engine.run()
    within = time.thread_time() - before
    assert "".join(chunk.text for chunk in stream.read())
    assert fake.runner is not None
    # All of the gate's work, in both of its calls, and nothing twice.
    assert spent >= 2 * fake.runner.launched * 0.002
    assert spent <= model.seconds < within
    engine.core.runner.close()
    assert fake.runner.closed
