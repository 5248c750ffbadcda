"""`StrictRunner` and `FakeRunner` compute the same from the same plans."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import nullcontext
from typing import Any

import pytest

from asyncinfer.scheduler import RunnerSpec, Step, StepResult
from asyncinfer.testing import FakeRunner, scenarios, simulation
from asyncinfer.testing.scenarios import simulate_scheduler
from asyncinfer.testing.strict_runner import StrictRunner

#: Tokens that both runners drew.
drawn: list[int] = []


class BothRunners(StrictRunner):
    """Hands every plan to a `FakeRunner` as well. No row fails: a step in flight behind one
    that does reads garbage, and each runner has its own."""

    def __init__(
        self,
        spec: RunnerSpec,
        *,
        failing: Callable[[Step], Mapping[int, Exception]],
        no_room: Callable[[Step], bool],
        **options: Any,
    ) -> None:
        def is_full(plan: Step) -> bool:
            self.full = no_room(plan)
            return self.full

        super().__init__(spec, no_room=is_full, **options)
        self.full = False
        #: None where there are windows, of which it knows nothing.
        self.twin = None
        if len(spec.groups) == 1:
            self.twin = FakeRunner(spec, no_room=lambda plan: self.full, **options)

    def launch(self, plan: Step) -> object:
        try:
            return super().launch(plan)
        finally:
            if self.twin is not None:
                with pytest.raises(MemoryError) if self.full else nullcontext():
                    self.twin.launch(plan)

    def collect(self, handle: object) -> StepResult:
        result = super().collect(handle)
        if self.twin is not None:
            assert self.twin.collect(handle) == result
            drawn.extend(result.tokens)
        return result


def test_both_compute_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    # With copies and retractions, but without drafts, which the fast one does not compute.
    monkeypatch.setattr(simulation, "StrictRunner", BothRunners)
    made = scenarios.Simulation
    monkeypatch.setattr(
        scenarios,
        "Simulation",
        lambda spec, **options: made(spec, **{**options, "proposer": None}),
    )
    drawn.clear()
    for seed in range(16):
        simulate_scheduler(seed, steps=60)
    assert len(drawn) > 500
