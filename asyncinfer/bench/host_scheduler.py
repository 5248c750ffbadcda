"""What one decode step costs in the scheduler: `schedule` and `update`, by themselves."""

from __future__ import annotations

from dataclasses import dataclass

from asyncinfer.bench.host_steps import both, decode_steps
from asyncinfer.bench.quantiles import Quantiles
from asyncinfer.testing import FakeModel, InlineEngine

__all__ = ["SchedulerCost", "measure_scheduler"]


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
    """Decode `running` requests over the prefix cache and time every `schedule` and `update`."""
    answer = warmup + steps + 4
    model = FakeModel(blocks=running * ((48 + answer) // 16 + 2), strict=False)
    # One step takes all prompts in.
    engine = InlineEngine(model, max_running=running, max_step_tokens=64 * running)
    assert model.runner is not None
    times = decode_steps(engine, model.runner, running, steps, warmup)
    return SchedulerCost(
        running=running,
        steps=steps,
        tokens=running * steps,
        schedule=Quantiles.of(times.schedule),
        update=Quantiles.of(times.update),
        both=both(times.schedule, times.update),
    )
