"""How far the decode loop runs ahead of the device."""

from __future__ import annotations

from collections import deque

import pytest

from asyncinfer.scheduler import Pace, Step

TOKENS = 2048


def after(pace: Pace, seconds: float, steps: int = 200) -> int:
    now = 5.0
    for _ in range(steps):
        now += seconds
        pace.stepped(now)
    pace.stepped(None)
    return pace.ahead


def flights(*tokens: int) -> list[Step]:
    steps = [Step(number) for number in range(len(tokens))]
    for step, count in zip(steps, tokens, strict=True):
        step.counts = [count]
    return steps


@pytest.mark.parametrize(
    ("seconds", "ahead"), [(1e-4, 4), (0.5e-3, 4), (0.7e-3, 3), (1e-3, 2), (4e-3, 2), (0.0, 4)]
)
@pytest.mark.parametrize("most", [4, 8])
def test_short_steps_are_launched_further_ahead(seconds: float, ahead: int, most: int) -> None:
    assert after(Pace(None, most, TOKENS), seconds) == ahead


def test_it_follows_when_steps_grow_longer() -> None:
    pace = Pace(None, 4, TOKENS)
    assert after(pace, 1e-4) == 4
    assert after(pace, 5e-3) == 2


def test_time_without_a_step_is_not_a_long_step() -> None:
    pace = Pace(None, 4, TOKENS)
    assert after(pace, 1e-4) == 4
    pace.stepped(1000.0)
    pace.stepped(1000.0001)
    assert pace.ahead == 4


@pytest.mark.parametrize(("fixed", "most", "ahead"), [(None, 1, 1), (3, 1, 3), (1, 4, 1)])
def test_what_was_asked_for_and_what_serves(fixed: int | None, most: int, ahead: int) -> None:
    assert Pace(fixed, most, TOKENS).ahead == ahead
    assert after(Pace(fixed, most, TOKENS), 1e-4) == ahead


def test_steps_in_flight_have_no_more_tokens_than_memory_is_set_aside_for() -> None:
    pace = Pace(8, 1, 100)
    assert pace.wants(flights(100, 100, 100))
    assert not pace.wants(flights(100, 100, 100, 1))
    assert pace.wants(flights(100, 100, 50, 50))
    assert pace.wants(flights(*[1] * 7))
    assert not pace.wants(flights(*[1] * 8))


class Host:
    """A decode loop beside a thread that keeps it away, and a device that computes steps in order,
    simulated. Times are in seconds."""

    def __init__(self, pace: Pace, step: float, turn: float, away: float, free: float) -> None:
        self.pace = pace
        self.step, self.turn, self.away, self.free = step, turn, away, free
        self.now = 0.0
        #: When the device has finished each step in flight, and whether it was launched late.
        self.flights: deque[tuple[float, bool]] = deque()
        self.steps = flights(*[1] * 16)
        self.finished = 0.0

    def work(self, seconds: float) -> None:
        """Compute for so long. The other thread has the lock for `away` of every `away + free`."""
        self.now += seconds
        cycle = self.away + self.free
        place = self.now % cycle
        if place < self.away:
            self.now += self.away - place

    def run(self, until: float) -> int:
        """Steps committed until then."""
        done = 0
        while self.now < until:
            while self.pace.wants(self.steps[: len(self.flights)]):
                self.work(self.turn / 2)
                late = bool(self.flights) and self.finished <= self.now
                self.finished = max(self.finished, self.now) + self.step
                self.flights.append((self.finished, late))
            finished, late = self.flights.popleft()
            # Who waits for the device gives up the lock; who does not, does not.
            if finished > self.now:
                self.now = finished
                self.work(0.0)
            self.now += self.turn / 2
            self.pace.stepped(self.now, late=late)
            done += 1
        return done


@pytest.mark.parametrize("step", [0.6e-3, 0.9e-3, 2e-3, 4e-3])
def test_a_device_does_not_run_idle_while_another_thread_has_the_lock(step: float) -> None:
    """5 of every 10 ms, as a program that is busy with Python half of the time has it."""
    alone = Host(Pace(None, 8, TOKENS), step, 0.2e-3, 0.0, 1.0).run(2.0)
    host = Host(Pace(None, 8, TOKENS), step, 0.2e-3, 5e-3, 5e-3)
    host.run(0.5)
    began = host.now
    beside = host.run(began + 2.0)
    # The rest is what eight steps in flight cannot cover.
    assert beside >= 0.9 * min(alone, 8 * 200), (alone, beside)


def test_a_loop_that_was_away_once_runs_no_further_ahead_a_second_later() -> None:
    pace = Pace(None, 8, TOKENS)
    assert after(pace, 1e-3) == 2
    now = 10.0
    pace.stepped(now)
    for between, late in [(6e-3, False), (1e-4, False), (1e-4, True), (1e-3, False)]:
        now += between
        pace.stepped(now, late=late)
    assert pace.ahead >= 6
    for _ in range(900):
        now += 1e-3
        pace.stepped(now)
    assert pace.ahead >= 6
    for _ in range(200):
        now += 1e-3
        pace.stepped(now)
    assert pace.ahead == 2


@pytest.mark.parametrize("late", [False, True])
def test_what_is_slow_all_the_time_is_not_waited_for(late: bool) -> None:
    """A host that is slower than the device gains nothing from more steps in flight; and long steps
    among short ones are no absence unless the device ran idle."""
    pace = Pace(None, 8, TOKENS)
    now = 5.0
    for turn in range(400):
        now += 1e-3 if late or turn % 10 else 20e-3
        pace.stepped(now, late=late)
    assert pace.ahead == 2


def test_a_runner_that_queues_steps_gets_them() -> None:
    pace = Pace(None, 1, TOKENS)
    steps = flights(8, 8, 8, 8)
    assert pace.wants([])
    assert not pace.wants(steps[:1])
    for step in steps:
        step.queued = 3
    assert [pace.wants(steps[:count]) for count in range(5)] == [True, True, True, False, False]
    # One that is computed when it is launched is collected at once.
    steps[1].queued = 0
    assert not pace.wants(steps[:2])
