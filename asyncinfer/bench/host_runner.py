"""What one decode step costs in the runner: everything but the device."""

from __future__ import annotations

import time
from dataclasses import dataclass

from asyncinfer.bench.host_scheduler import staggered_prompt
from asyncinfer.bench.quantiles import Quantiles
from asyncinfer.bench.record import BenchError
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
    """Decode `running` requests on a device that takes no time: every step is a replay. Prompts end
    at different places in a block, so that each step has its share of growing tables."""
    answer = warmup + steps + 4
    model = IdleModel(blocks=running * ((48 + answer) // 16 + 2), max_context=64 + answer)
    # One step takes all prompts in.
    engine = InlineEngine(
        model, max_running=running, max_step_tokens=64 * running, prefix_cache=False
    )
    scheduler, runner = engine.scheduler, model.runner
    assert runner is not None
    for index in range(running):
        engine.submit(staggered_prompt(index), max_tokens=answer, temperature=0.0, ignore_eos=True)
    engine.pump()
    launch_us, collect_us, tokens = [], [], 0
    for step in range(warmup + steps):
        plan = scheduler.schedule(0.0)
        assert plan is not None
        began = time.thread_time_ns()
        handle = runner.launch(plan)
        launched = time.thread_time_ns()
        result = runner.collect(handle)
        ended = time.thread_time_ns()
        out = scheduler.update(plan, result, 0.0)
        if step >= warmup:
            launch_us.append((launched - began) / 1e3)
            collect_us.append((ended - launched) / 1e3)
            tokens += sum(map(len, out.tokens))
    if tokens != running * len(launch_us):
        raise BenchError(f"{tokens} tokens in {len(launch_us)} steps of {running} requests")
    both = [a + b for a, b in zip(launch_us, collect_us, strict=True)]
    return RunnerCost(
        running=running,
        steps=len(both),
        tokens=tokens,
        launch=Quantiles.of(launch_us),
        collect=Quantiles.of(collect_us),
        both=Quantiles.of(both),
    )
