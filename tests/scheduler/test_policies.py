"""Who goes first; ageing; broken policies; the queue."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from typing import Any

import pytest

from asyncinfer.errors import PluginError
from asyncinfer.params import SamplingParams
from asyncinfer.protocols import RequestView, SchedulingPolicy
from asyncinfer.scheduler import FCFS, POLICIES, Deadline, Priority, Sequence
from asyncinfer.scheduler.queue import Ranking, WaitingQueue
from asyncinfer.testing.simulation import Simulation

Make = Callable[..., Simulation]
Greedy = Callable[..., SamplingParams]


def sequence(id: int, arrival: float = 0.0, **options: Any) -> Sequence:
    return Sequence(id, [1], SamplingParams(), max_total=9, seed=0, arrival=arrival, **options)


def order(policy: SchedulingPolicy, sequences: list[Sequence], now: float = 0.0) -> list[int]:
    ranking = Ranking(policy)
    return [r.id for r in sorted(sequences, key=lambda r: ranking.rank(r, now))]


def test_first_come_first_served() -> None:
    sequences = [sequence(1, 2.0, priority=9), sequence(2, 1.0), sequence(3, 1.0, deadline=0.5)]
    assert order(FCFS(), sequences) == [2, 3, 1]


def test_priority_goes_by_urgency_then_arrival() -> None:
    sequences = [
        sequence(1),
        sequence(2, priority=1),
        sequence(3, priority=1),
        sequence(4, priority=-1),
    ]
    assert order(Priority(), sequences) == [2, 3, 1, 4]


def test_waiting_long_enough_overtakes_priority() -> None:
    # fault 50
    low = sequence(1, arrival=0.0, priority=0)
    assert order(Priority(ageing=10.0), [low, sequence(2, 9.0, priority=1)]) == [2, 1]
    assert order(Priority(ageing=10.0), [low, sequence(2, 11.0, priority=1)]) == [1, 2]


def test_the_earliest_deadline_goes_first_and_none_is_due_after_patience() -> None:
    sequences = [sequence(1), sequence(2, deadline=70.0), sequence(3, deadline=5.0)]
    assert order(Deadline(patience=60.0), sequences) == [3, 1, 2]


@pytest.mark.parametrize("bad", [0.0, -1.0, math.nan])
def test_bad_options_are_refused(bad: float) -> None:
    with pytest.raises(ValueError, match="ageing"):
        Priority(bad)
    with pytest.raises(ValueError, match="patience"):
        Deadline(bad)


def test_the_shipped_policies_have_the_names_of_the_config() -> None:
    assert set(POLICIES) == {"deadline", "fcfs", "priority"}
    assert all(isinstance(policy(), SchedulingPolicy) for policy in POLICIES.values())


@pytest.mark.parametrize("name", ["priority", "deadline"])
def test_nothing_starves_under_endless_urgent_load(make: Make, greedy: Greedy, name: str) -> None:
    # fault 50: one slot, and a more urgent request always waits.
    policy = Priority(ageing=1.0) if name == "priority" else Deadline(patience=1.0)
    sim = make(slots=1, policy=policy)
    urgent: dict[str, Any] = {"priority": 3} if name == "priority" else {}
    sim.submit([1], greedy(2), **urgent)
    sim.step()
    starving = sim.submit([2], greedy(2))[0]
    for _ in range(100):
        if name == "deadline":
            urgent["deadline"] = sim.now + 0.5
        sim.submit([3], greedy(2), **urgent)
        sim.step(dt=0.1)
        sim.forget()
        if starving.ended is not None:
            break
    else:
        pytest.fail("it starved")
    assert 0.5 < sim.now < 8.0, "it overtook those that came much later, not those before"
    sim.drain()


class Broken:
    def __init__(self, answer: Callable[[], Any]) -> None:
        self.answer = answer

    def rank(self, request: RequestView, now: float) -> tuple[float, ...]:
        return self.answer()  # type: ignore[no-any-return]


@pytest.mark.parametrize(
    "answer",
    [
        lambda: 1 / 0,
        lambda: None,
        lambda: 3.0,
        lambda: (math.nan,),
        lambda: ("a",),
        lambda: (None,),
        lambda: (1j,),
        lambda: (0.0,) * 17,
    ],
)
def test_a_broken_policy_is_replaced_and_reported_once(
    make: Make, greedy: Greedy, answer: Callable[[], Any]
) -> None:
    faults: list[Exception] = []
    sim = make(slots=1, policy=Broken(answer), on_fault=faults.append)
    tracks = [sim.submit([first], greedy(2))[0] for first in (1, 2, 3)]
    sim.drain()
    assert [track.ended for track in tracks] == ["length"] * 3
    assert len(faults) == 1
    assert isinstance(faults[0], PluginError)
    assert "Broken" in str(faults[0])


class OwnNumber(float):
    """Breaks whoever compares it."""

    def __lt__(self, other: object) -> bool:
        raise RuntimeError("compared")

    __gt__ = __le__ = __ge__ = __lt__


def test_numbers_of_its_own_are_compared_as_plain_ones(make: Make, greedy: Greedy) -> None:
    sim = make(slots=1, policy=Broken(lambda: (OwnNumber(1.0),)))
    tracks = [sim.submit([first], greedy(2))[0] for first in (1, 2, 3)]
    sim.drain()
    assert [track.ended for track in tracks] == ["length"] * 3


class Vandal:
    """Writes to the request."""

    def __init__(self, field: str) -> None:
        self.field = field

    def rank(self, request: RequestView, now: float) -> tuple[float, ...]:
        setattr(request, self.field, 0)
        return (0.0,)


@pytest.mark.parametrize("field", [field.name for field in dataclasses.fields(RequestView)])
def test_a_policy_cannot_write_to_a_request(make: Make, greedy: Greedy, field: str) -> None:
    faults: list[Exception] = []
    sim = make(slots=1, policy=Vandal(field), on_fault=faults.append)
    tracks = [sim.submit([first, 2, 3], greedy(2))[0] for first in (1, 2, 3)]
    sim.drain()
    assert [track.ended for track in tracks] == ["length"] * 3
    (fault,) = faults
    assert "scheduling policy Vandal: rank() raised: FrozenInstanceError" in str(fault)
    assert f"cannot assign to field '{field}'" in str(fault)
    assert "first-come-first-served takes over" in str(fault)


def test_a_policy_sees_how_often_a_request_was_preempted(make: Make, greedy: Greedy) -> None:
    seen: set[tuple[int, int]] = set()

    class Watching:
        def rank(self, request: RequestView, now: float) -> tuple[float, ...]:
            seen.add((request.prompt_len, request.preemptions))
            return (request.arrival,)

    sim = make(slots=2, blocks=5, policy=Watching())
    for length in (3, 4):
        sim.submit([length] * length, greedy(14))
        sim.step()
    sim.drain()
    assert sim.scheduler.counters.preemptions
    assert {(3, 0), (4, 0), (4, 1)} <= seen


class Clocked:
    """Takes its time, by a clock of the test's."""

    def __init__(self, seconds: float) -> None:
        self.now, self.seconds, self.calls = 0.0, seconds, 0

    def rank(self, request: RequestView, now: float) -> tuple[float, ...]:
        self.now += self.seconds
        self.calls += 1
        return (-request.arrival,)


@pytest.mark.parametrize(("seconds", "calls"), [(30.0, 1), (0.2, 6), (0.00115, 953)])
def test_a_slow_policy_is_replaced_and_reported_once(seconds: float, calls: int) -> None:
    faults: list[Exception] = []
    policy = Clocked(seconds)
    ranking = Ranking(policy, faults.append, lambda: policy.now, "plugin 'mine'")
    queue = WaitingQueue(ranking)
    for id in range(2000):
        queue.push(sequence(id, arrival=float(id)), 0.0)
    assert policy.calls == calls
    first = queue.peek(0.0)
    assert first is not None
    assert first.id == 0, "the order is that of the successor"
    (fault,) = faults
    assert "plugin 'mine': rank() is too slow" in str(fault)


def test_a_slow_call_now_and_then_is_forgiven() -> None:
    policy = Clocked(0.0)
    ranking = Ranking(policy, clock=lambda: policy.now)
    # Two of them in a row would be too much.
    for id in range(4):
        policy.seconds = 0.9
        ranking.rank(sequence(id), 0.0)
        policy.seconds = 0.0
        for _ in range(10_000):
            ranking.rank(sequence(id), 0.0)
    assert not ranking.broken


def test_a_policy_that_breaks_late_leaves_a_usable_order() -> None:
    answers = iter([(5.0,), (4.0,)])
    faults: list[Exception] = []
    queue = WaitingQueue(Ranking(Broken(lambda: next(answers)), faults.append))
    for id in (1, 2, 3):
        queue.push(sequence(id, arrival=float(id)), 0.0)
    assert len(faults) == 1
    first = queue.peek(0.0)
    assert first is not None
    assert first.id == 1


class Flipping:
    """Prefers the oldest until half a second, the youngest after."""

    def __init__(self) -> None:
        self.calls = 0

    def rank(self, request: RequestView, now: float) -> tuple[float, ...]:
        self.calls += 1
        return (request.arrival if now < 0.5 else -request.arrival,)


def test_ranks_that_change_with_time_are_refreshed() -> None:
    queue = WaitingQueue(Ranking(Flipping()))
    for id in range(3):
        queue.push(sequence(id, arrival=float(id)), 0.0)
    first = queue.peek(0.0)
    assert first is not None
    assert first.id == 0
    first = queue.peek(1.0)
    assert first is not None
    assert first.id == 2


def test_two_thousand_waiting_requests_cost_a_step_nothing(make: Make, greedy: Greedy) -> None:
    policy = Flipping()
    sim = make(slots=2, policy=policy)
    for _ in range(2):
        sim.submit([1, 2], greedy(50))
    sim.step(dt=0.0)
    scheduler = sim.scheduler
    for id in range(100, 2100):
        scheduler.add(sequence(id))
    plan = scheduler.schedule(sim.now)
    assert plan is not None
    scheduler.update(plan, sim.runner.collect(sim.runner.launch(plan)), sim.now)
    before = policy.calls
    for _ in range(20):
        plan = scheduler.schedule(sim.now)
        assert plan is not None
        scheduler.update(plan, sim.runner.collect(sim.runner.launch(plan)), sim.now)
    assert policy.calls == before


def test_the_queue_forgets_what_was_removed() -> None:
    queue = WaitingQueue(Ranking(FCFS()))
    sequences = [sequence(id) for id in range(1000)]
    for r in sequences:
        queue.push(r, 0.0)
    for r in sequences[:990]:
        queue.remove(r)
    assert queue.size == 10
    assert queue.entries <= 2 * 10 + 64
    assert {r.id for r in queue} == set(range(990, 1000))
    first = queue.peek(0.0)
    assert first is not None
    assert first.id == 990
    queue.remove(first)
    queue.push(first, 0.0)
    again = queue.peek(0.0)
    assert again is first
