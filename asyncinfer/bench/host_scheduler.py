"""What one decode step costs in the scheduler: `schedule` and `update`, by themselves."""

from __future__ import annotations

import time
from dataclasses import dataclass

from asyncinfer.bench.quantiles import Quantiles
from asyncinfer.bench.record import BenchError
from asyncinfer.testing import FakeModel, InlineEngine

__all__ = ["SchedulerCost", "measure_scheduler", "staggered_prompt"]


@dataclass(frozen=True, slots=True)
class SchedulerCost:
    """Microseconds of CPU (the thread's own time) per step."""

    running: int
    steps: int
    tokens: int
    schedule: Quantiles
    update: Quantiles
    both: Quantiles


def measure_scheduler(running: int = 256, steps: int = 400, warmup: int = 50) -> SchedulerCost:
    """Decode `running` requests over the prefix cache and time every `schedule` and `update`.

    Prompts end at different places in a block, so that each step sees its share of full ones.
    """
    answer = warmup + steps + 2
    model = FakeModel(blocks=running * ((48 + answer) // 16 + 2), strict=False)
    # One step takes all prompts in, so that all answers are equally long at any time.
    engine = InlineEngine(model, max_running=running, max_step_tokens=64 * running)
    scheduler, runner = engine.scheduler, model.runner
    assert runner is not None
    for index in range(running):
        engine.submit(staggered_prompt(index), max_tokens=answer, temperature=0.0, ignore_eos=True)
    engine.pump()
    schedule_us, update_us, tokens = [], [], 0
    for step in range(warmup + steps):
        began = time.thread_time_ns()
        plan = scheduler.schedule(0.0)
        scheduled = time.thread_time_ns()
        assert plan is not None
        result = runner.collect(runner.launch(plan))
        ran = time.thread_time_ns()
        out = scheduler.update(plan, result, 0.0)
        ended = time.thread_time_ns()
        if step >= warmup:
            schedule_us.append((scheduled - began) / 1e3)
            update_us.append((ended - ran) / 1e3)
            tokens += sum(map(len, out.tokens))
    if tokens != running * len(schedule_us):
        raise BenchError(f"{tokens} tokens in {len(schedule_us)} steps of {running} requests")
    both = [a + b for a, b in zip(schedule_us, update_us, strict=True)]
    return SchedulerCost(
        running=running,
        steps=len(both),
        tokens=tokens,
        schedule=Quantiles.of(schedule_us),
        update=Quantiles.of(update_us),
        both=Quantiles.of(both),
    )


def staggered_prompt(index: int) -> list[int]:
    """32 to 47 bytes that no other index below 2**16 has."""
    head = [1 + index % 251, 1 + index // 251 % 251, 1 + index // 63_001]
    return head + [7] * (29 + index % 16)
