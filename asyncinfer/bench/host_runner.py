"""What one decode step costs in the runner: everything but the device."""

from __future__ import annotations

from dataclasses import dataclass

from asyncinfer.bench.host_steps import both, decode_steps
from asyncinfer.bench.quantiles import Quantiles
from asyncinfer.testing import IdleModel, InlineEngine

__all__ = ["RunnerCost", "measure_runner"]


@dataclass(frozen=True, slots=True)
class RunnerCost:
    """Microseconds of CPU (the thread's own time) per step."""

    running: int
    steps: int
    tokens: int
    launch: Quantiles
    collect: Quantiles
    both: Quantiles


def measure_runner(running: int = 256, steps: int = 400, warmup: int = 50) -> RunnerCost:
    """Decode `running` requests on a device that takes no time: every step is a replay."""
    answer = warmup + steps + 4
    model = IdleModel(blocks=running * ((48 + answer) // 16 + 2), max_context=64 + answer)
    # One step takes all prompts in.
    engine = InlineEngine(
        model, max_running=running, max_step_tokens=64 * running, prefix_cache=False
    )
    assert model.runner is not None
    times = decode_steps(engine, model.runner, running, steps, warmup)
    return RunnerCost(
        running=running,
        steps=steps,
        tokens=running * steps,
        launch=Quantiles.of(times.launch),
        collect=Quantiles.of(times.collect),
        both=both(times.launch, times.collect),
    )
