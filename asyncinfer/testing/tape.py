"""`PlanTape`: the plans of a run, to be played to a runner by itself.

What a `FakeRunner` costs is then known apart from what the engine around it costs.
"""

from __future__ import annotations

import time
from dataclasses import replace

from asyncinfer.scheduler import RunnerSpec, StepPlan
from asyncinfer.testing.fake_model import FakeRunner

__all__ = ["PlanTape"]


class PlanTape:
    """Hand every launched plan to `record`, from a gate."""

    def __init__(self) -> None:
        self._plans: list[StepPlan] = []

    def __len__(self) -> int:
        return len(self._plans)

    def record(self, plan: StepPlan) -> None:
        # A join may refer to the request's own list of tokens, which grows.
        joins = [
            replace(join, token_ids=tuple(join.token_ids), blocks=tuple(join.blocks))
            for join in plan.joins
        ]
        self._plans.append(replace(plan, joins=joins) if joins else plan)

    def play(self, spec: RunnerSpec, first: int, last: int) -> float:
        """Seconds of CPU that a fresh `FakeRunner` takes for plans `first` to `last - 1`, those
        before them having been run. It checks each plan as it did in the run."""
        runner = FakeRunner(spec)
        for plan in self._plans[:first]:
            runner.collect(runner.launch(plan))
        began = time.thread_time()
        for plan in self._plans[first:last]:
            runner.collect(runner.launch(plan))
        spent = time.thread_time() - began
        runner.close()
        return spent
