"""How many decode steps are in flight on a CPU."""

from __future__ import annotations

import pytest

from asyncinfer.runner.queue_pace import MOST_QUEUED, QueuePace


def after(pace: QueuePace, seconds: float, away: float, times: int = 100) -> int:
    for _ in range(times):
        pace.computed(seconds, away)
    return pace.steps


@pytest.mark.parametrize(
    ("seconds", "steps"),
    [(1e-4, 3), (2e-3, 3), (5e-3, 2), (8e-3, 2), (11e-3, 2), (13e-3, 1), (0.1, 1)],
)
@pytest.mark.parametrize("away", [0.0, 0.05, -0.1])
def test_short_ones_follow_each_other_where_nobody_else_computes(
    seconds: float, away: float, steps: int
) -> None:
    assert after(QueuePace(), seconds, away * seconds) == steps


@pytest.mark.parametrize(
    ("seconds", "steps"),
    [(1e-3, MOST_QUEUED), (8e-3, 6), (0.013, 4), (16e-3, 3), (0.03, 2), (0.5, 1)],
)
def test_beside_others_they_take_a_twentieth_of_a_second(seconds: float, steps: int) -> None:
    assert after(QueuePace(), seconds, seconds / 4) == steps


def test_the_first_step_is_computed_at_once() -> None:
    assert QueuePace().steps == 1


def test_one_long_wait_changes_nothing() -> None:
    pace = QueuePace()
    assert after(pace, 8e-3, 0.0) == 2
    assert after(pace, 8e-3, 7e-3, times=1) == 2
    assert after(pace, 8e-3, 3e-3) == 6


def test_they_are_fewer_when_the_others_go() -> None:
    pace = QueuePace()
    assert after(pace, 8e-3, 3e-3) == 6
    assert after(pace, 8e-3, 0.0, times=20) == 2


def test_a_clock_that_stands_still() -> None:
    assert after(QueuePace(), 0.0, 0.0) == 1
