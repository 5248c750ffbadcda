"""What ends the waits for a step that hangs, with fewer requests than are measured."""

from __future__ import annotations

from benchmarks.hanging_step import CASES, PHASES, measure_hanging_step


def test_each_case_ends_by_its_own_error() -> None:
    found = measure_hanging_step(3, 0.05)
    errors = ("DeadlineExceeded", "cancellation", "EngineClosed", "EngineDead")
    assert [(each.case, each.phase, each.ended_by) for each in found] == [
        (case, phase, (error,))
        for case, error in zip(CASES, errors, strict=True)
        for phase in PHASES
    ]
