"""How far the decode loop runs ahead of the device."""

from __future__ import annotations

import pytest

from asyncinfer.scheduler import Pace


def after(pace: Pace, seconds: float, steps: int = 200) -> int:
    now = 5.0
    for _ in range(steps):
        now += seconds
        pace.stepped(now)
    pace.stepped(None)
    return pace.ahead


@pytest.mark.parametrize(
    ("seconds", "ahead"), [(1e-4, 4), (0.5e-3, 4), (0.7e-3, 3), (1e-3, 2), (4e-3, 2), (0.0, 4)]
)
def test_short_steps_are_launched_further_ahead(seconds: float, ahead: int) -> None:
    assert after(Pace(None, 4), seconds) == ahead


def test_it_follows_when_steps_grow_longer() -> None:
    pace = Pace(None, 4)
    assert after(pace, 1e-4) == 4
    assert after(pace, 5e-3) == 2


def test_time_without_a_step_is_not_a_long_step() -> None:
    pace = Pace(None, 4)
    assert after(pace, 1e-4) == 4
    pace.stepped(1000.0)
    pace.stepped(1000.0001)
    assert pace.ahead == 4


@pytest.mark.parametrize(("fixed", "most", "ahead"), [(None, 1, 1), (3, 1, 3), (1, 4, 1)])
def test_what_was_asked_for_and_what_serves(fixed: int | None, most: int, ahead: int) -> None:
    assert Pace(fixed, most).ahead == ahead
    assert after(Pace(fixed, most), 1e-4) == ahead
