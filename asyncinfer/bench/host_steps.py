"""`decode_steps`: steps of an engine without a thread, each of their parts timed by itself."""

from __future__ import annotations

import time
from dataclasses import dataclass, field

from asyncinfer.bench.quantiles import Quantiles
from asyncinfer.bench.record import BenchError
from asyncinfer.testing import InlineEngine, StepRunner

__all__ = ["StepTimes", "both", "decode_steps", "staggered_prompt"]


@dataclass(frozen=True, slots=True)
class StepTimes:
    """Microseconds of CPU (the thread's own time) of each step."""

    schedule: list[float] = field(default_factory=list)
    launch: list[float] = field(default_factory=list)
    collect: list[float] = field(default_factory=list)
    update: list[float] = field(default_factory=list)


def decode_steps(
    engine: InlineEngine, runner: StepRunner, running: int, steps: int, warmup: int
) -> StepTimes:
    """Decode `running` requests, whose prompts are all taken in by the first step. Prompts end at
    different places in a block, so that each step has its share of full ones."""
    scheduler, tokens = engine.scheduler, 0
    for index in range(running):
        prompt = staggered_prompt(index)
        engine.submit(prompt, max_tokens=warmup + steps + 4, temperature=0.0, ignore_eos=True)
    engine.pump()
    times = StepTimes()
    for step in range(warmup + steps):
        began = time.thread_time_ns()
        plan = scheduler.schedule(0.0)
        scheduled = time.thread_time_ns()
        assert plan is not None
        handle = runner.launch(plan)
        launched = time.thread_time_ns()
        result = runner.collect(handle)
        collected = time.thread_time_ns()
        out = scheduler.update(plan, result, 0.0)
        ended = time.thread_time_ns()
        if step >= warmup:
            times.schedule.append((scheduled - began) / 1e3)
            times.launch.append((launched - scheduled) / 1e3)
            times.collect.append((collected - launched) / 1e3)
            times.update.append((ended - collected) / 1e3)
            tokens += sum(map(len, out.tokens))
    if tokens != running * steps:
        raise BenchError(f"{tokens} tokens in {steps} steps of {running} requests")
    return times


def both(one: list[float], other: list[float]) -> Quantiles:
    """Of the two together, step by step."""
    return Quantiles.of([a + b for a, b in zip(one, other, strict=True)])


def staggered_prompt(index: int) -> list[int]:
    """32 to 47 bytes that no other index below 2**16 has."""
    head = [1 + index % 251, 1 + index // 251 % 251, 1 + index // 63_001]
    return head + [7] * (29 + index % 16)
