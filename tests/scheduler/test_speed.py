"""The host's share of a step, in CPU time of this thread: a busy machine does not matter."""

from __future__ import annotations

from statistics import median
from time import thread_time

import pytest

from asyncinfer.cache import PrefixCache
from asyncinfer.params import SamplingParams
from asyncinfer.scheduler import FCFS, Request, RunnerSpec, Scheduler, StepResult

SPEC = RunnerSpec(
    num_blocks=8192,
    block_size=16,
    max_slots=256,
    max_context=4096,
    vocab_size=32_000,
    max_step_tokens=2048,
)


@pytest.mark.parametrize("waiting", [0, 2000])
def test_a_step_of_256_decodes_costs_less_than_a_millisecond(waiting: int) -> None:
    scheduler = Scheduler(SPEC, policy=FCFS(), cache=PrefixCache(16))
    params = SamplingParams(temperature=0.0, max_tokens=1000)
    for id in range(256 + waiting):
        prompt = [id] * (32 + id % 16)
        scheduler.add(Request(id, prompt, params, max_total=1100, seed=0, arrival=float(id)))
    costs: list[float] = []
    for step in range(150):
        began = thread_time()
        plan = scheduler.schedule(float(step))
        scheduled = thread_time() - began
        assert plan is not None
        result = StepResult([7] * sum(plan.samples))
        began = thread_time()
        scheduler.update(plan, result, float(step))
        if len(plan.slots) == plan.tokens == 256:
            costs.append(scheduled + thread_time() - began)
    assert len(costs) > 100
    assert median(costs) < 1e-3
