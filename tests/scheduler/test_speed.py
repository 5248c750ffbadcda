"""The host's share of a step, in lines of Python: a busy machine does not matter."""

from __future__ import annotations

from pathlib import Path

import pytest
from support import lines_run

from asyncinfer import scheduler as room
from asyncinfer.cache import KVGroupSpec, PrefixCache
from asyncinfer.params import SamplingParams
from asyncinfer.scheduler import FCFS, Request, RunnerSpec, Scheduler, StepResult

SPEC = RunnerSpec(
    groups=(KVGroupSpec(8192),),
    block_size=16,
    max_slots=256,
    max_context=4096,
    vocab_size=32_000,
    max_step_tokens=2048,
)


@pytest.mark.parametrize("waiting", [0, 2000])
def test_a_step_of_256_decodes_costs_some_lines_each(waiting: int) -> None:
    scheduler = Scheduler(SPEC, policy=FCFS(), cache=PrefixCache(16))
    params = SamplingParams(temperature=0.0, max_tokens=1000)
    for id in range(256 + waiting):
        prompt = [id] * (32 + id % 16)
        scheduler.add(Request(id, prompt, params, max_total=1100, seed=0, arrival=float(id)))

    def step() -> int:
        plan = scheduler.schedule(0.0)
        assert plan is not None
        scheduler.update(plan, StepResult([7] * sum(plan.samples)), 0.0)
        return plan.tokens

    while step() != 256:
        pass
    folder = str(Path(room.__file__).parent)
    count = lines_run(lambda: [step() for _ in range(16)], folder)
    # 26 lines, whatever waits; a sixteenth of the requests get a block in each step.
    assert 0 < count < 16 * 256 * 30
