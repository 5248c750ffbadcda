"""What one decode step costs the host: scheduler and runner by themselves, in an engine without a
thread."""

from __future__ import annotations

import time
from dataclasses import dataclass, field

from asyncinfer.bench.host import StepCost
from asyncinfer.bench.host_tokens import staggered_prompt
from asyncinfer.bench.quantiles import Quantiles
from asyncinfer.bench.record import BenchError
from asyncinfer.testing import FakeModel, InlineEngine, StepRunner

__all__ = ["measure_runner", "measure_scheduler"]


def measure_scheduler(running: int = 256, steps: int = 400, warmup: int = 50) -> StepCost:
    """`schedule` and `update` of `running` requests that decode over the prefix cache."""
    answer = warmup + steps + 4
    model = FakeModel(blocks=_blocks(running, answer), strict=False)
    # One step takes all prompts in.
    engine = InlineEngine(model, max_running=running, max_step_tokens=64 * running)
    times = _decode(engine, model.runner, running, steps, warmup)
    return _cost(running, steps, times.schedule, times.update)


def measure_runner(running: int = 256, steps: int = 400, warmup: int = 50) -> StepCost:
    """`launch` and `collect` of `running` requests on a device that takes no time: every step is a
    replay."""
    # It imports torch, which a help text does without.
    from benchmarks.idle_device import IdleModel

    answer = warmup + steps + 4
    model = IdleModel(blocks=_blocks(running, answer), max_context=64 + answer)
    # One step takes all prompts in.
    engine = InlineEngine(
        model, max_running=running, max_step_tokens=64 * running, prefix_cache=False
    )
    times = _decode(engine, model.runner, running, steps, warmup)
    return _cost(running, steps, times.launch, times.collect)


@dataclass(frozen=True, slots=True)
class _Times:
    """Microseconds of CPU (the thread's own time) of each step."""

    schedule: list[float] = field(default_factory=list)
    launch: list[float] = field(default_factory=list)
    collect: list[float] = field(default_factory=list)
    update: list[float] = field(default_factory=list)


def _decode(
    engine: InlineEngine, runner: StepRunner | None, running: int, steps: int, warmup: int
) -> _Times:
    """Decode `running` requests. Their prompts end at different places in a block, so that each
    step has its share of full blocks."""
    assert runner is not None, "the engine has loaded the model"
    scheduler, tokens = engine.scheduler, 0
    for index in range(running):
        prompt = staggered_prompt(index)
        engine.submit(prompt, max_tokens=warmup + steps + 4, temperature=0.0, ignore_eos=True)
    engine.pump()
    times = _Times()
    for step in range(warmup + steps):
        began = time.thread_time_ns()
        plan = scheduler.schedule(0.0)
        scheduled = time.thread_time_ns()
        assert plan is not None
        handle = runner.launch(plan)
        launched = time.thread_time_ns()
        result = runner.collect(handle)
        collected = time.thread_time_ns()
        scheduler.update(plan, result, 0.0)
        ended = time.thread_time_ns()
        if step >= warmup:
            times.schedule.append((scheduled - began) / 1e3)
            times.launch.append((launched - scheduled) / 1e3)
            times.collect.append((collected - launched) / 1e3)
            times.update.append((ended - collected) / 1e3)
            tokens += sum(len(drawn) for drawn in plan.drawn if drawn is not None)
    if tokens != running * steps:
        raise BenchError(f"{tokens} tokens in {steps} steps of {running} requests")
    return times


def _blocks(running: int, answer: int) -> int:
    """Blocks for so many prompts of up to 48 tokens with their answers, and one to spare each."""
    return running * ((48 + answer) // 16 + 2)


def _cost(running: int, steps: int, first: list[float], second: list[float]) -> StepCost:
    return StepCost(
        running=running,
        steps=steps,
        tokens=running * steps,
        first=Quantiles.of(first),
        second=Quantiles.of(second),
        both=Quantiles.of([a + b for a, b in zip(first, second, strict=True)]),
    )
