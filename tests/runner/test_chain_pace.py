"""How many decode steps are computed in one go."""

from __future__ import annotations

import pytest

from asyncinfer.runner.chain_pace import ChainPace


def after(pace: ChainPace, seconds: float, away: float, times: int = 30) -> int:
    for _ in range(times):
        pace.computed(pace.steps, seconds * pace.steps, away)
    return pace.steps


@pytest.mark.parametrize(
    ("seconds", "steps"), [(1e-3, 4), (8e-3, 4), (0.013, 4), (16e-3, 3), (0.03, 2), (0.5, 1)]
)
def test_as_many_as_take_a_twentieth_of_a_second(seconds: float, steps: int) -> None:
    assert after(ChainPace(), seconds, seconds / 4) == steps


@pytest.mark.parametrize("away", [0.0, 0.05, -0.1])
def test_one_where_nobody_else_computes(away: float) -> None:
    pace = ChainPace()
    assert pace.steps == 1
    assert after(pace, 8e-3, away * 8e-3) == 1


def test_one_long_wait_changes_nothing() -> None:
    pace = ChainPace()
    after(pace, 8e-3, 0.0)
    assert after(pace, 8e-3, 7e-3, times=1) == 1
    assert after(pace, 8e-3, 3e-3) == 4


def test_it_is_one_again_when_the_others_go() -> None:
    pace = ChainPace()
    assert after(pace, 8e-3, 3e-3) == 4
    assert after(pace, 8e-3, 0.0, times=20) == 1


def test_a_clock_that_stands_still() -> None:
    assert after(ChainPace(), 0.0, 0.0) == 1
