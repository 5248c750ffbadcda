"""What ends a wait in the middle of a prefill of a real model, smaller than the one measured."""

from __future__ import annotations

from benchmarks.shapes import TINY, shape_json
from benchmarks.slow_prefill import measure_slow_prefill


def test_each_case_ends_by_its_own_error() -> None:
    found = measure_slow_prefill(shape_json(TINY), 4000, 0.001)
    assert [(each.case, each.ended_by) for each in found] == [
        ("deadline", "DeadlineExceeded"),
        ("cancellation", "cancellation"),
        ("close", "EngineClosed"),
        ("death", "EngineDead"),
    ]
