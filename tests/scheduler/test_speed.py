"""How the host's share of a step grows, in lines that run: a busy machine does not matter."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from support import lines_run

from asyncinfer import scheduler as room
from asyncinfer.cache import KVGroupSpec, PrefixCache
from asyncinfer.params import SamplingParams
from asyncinfer.scheduler import FCFS, RunnerSpec, Scheduler, Sequence, StepResult

SPEC = RunnerSpec(
    groups=(KVGroupSpec(8192),),
    block_size=16,
    max_slots=256,
    max_context=4096,
    vocab_size=32_000,
    max_step_tokens=2048,
)


def lines_of_steps(running: int, waiting: int) -> int:
    """What sixteen steps of so many decode rows take."""
    spec = replace(SPEC, max_slots=running)
    scheduler = Scheduler(spec, policy=FCFS(), cache=PrefixCache(16))
    params = SamplingParams(temperature=0.0, max_tokens=1000)
    for id in range(running + waiting):
        prompt = [id] * (32 + id % 16)
        scheduler.add(Sequence(id, prompt, params, max_total=1100, seed=0, arrival=float(id)))

    def step() -> int:
        plan = scheduler.schedule(0.0)
        assert plan is not None
        scheduler.update(plan, StepResult([7] * sum(plan.samples)), 0.0)
        return plan.tokens

    while step() != running:
        pass
    # A sixteenth of the requests get a block in each step.
    return lines_run(lambda: [step() for _ in range(16)], str(Path(room.__file__).parent))


def test_a_step_costs_the_same_for_each_row_whatever_waits() -> None:
    alone = lines_of_steps(256, 0)
    assert 0 < alone <= 4 * lines_of_steps(64, 0)
    # A few lines a step, which look at who is next.
    assert lines_of_steps(256, 2000) <= alone + 16 * 60
