"""Who goes first; ageing; broken policies; the queue."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest

from asyncinfer.errors import PluginError
from asyncinfer.params import SamplingParams
from asyncinfer.protocols import RequestView, SchedulingPolicy
from asyncinfer.scheduler import FCFS, POLICIES, Deadline, Priority, Request
from asyncinfer.scheduler.queue import Ranking, WaitingQueue
from asyncinfer.testing.simulation import Simulation

Make = Callable[..., Simulation]
Greedy = Callable[..., SamplingParams]


def request(id: int, arrival: float = 0.0, **options: Any) -> Request:
    return Request(id, [1], SamplingParams(), max_total=9, seed=0, arrival=arrival, **options)


def order(policy: SchedulingPolicy, requests: list[Request], now: float = 0.0) -> list[int]:
    ranking = Ranking(policy)
    return [r.id for r in sorted(requests, key=lambda r: ranking.rank(r, now))]


def test_first_come_first_served() -> None:
    requests = [request(1, 2.0, priority=9), request(2, 1.0), request(3, 1.0, deadline=0.5)]
    assert order(FCFS(), requests) == [2, 3, 1]


def test_priority_goes_by_urgency_then_arrival() -> None:
    requests = [request(1), request(2, priority=1), request(3, priority=1), request(4, priority=-1)]
    assert order(Priority(), requests) == [2, 3, 1, 4]


def test_waiting_long_enough_overtakes_priority() -> None:
    # fault 50
    low = request(1, arrival=0.0, priority=0)
    assert order(Priority(ageing=10.0), [low, request(2, 9.0, priority=1)]) == [2, 1]
    assert order(Priority(ageing=10.0), [low, request(2, 11.0, priority=1)]) == [1, 2]


def test_the_earliest_deadline_goes_first_and_none_is_due_after_patience() -> None:
    requests = [request(1), request(2, deadline=70.0), request(3, deadline=5.0)]
    assert order(Deadline(patience=60.0), requests) == [3, 1, 2]


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


def test_a_policy_that_breaks_late_leaves_a_usable_order() -> None:
    answers = iter([(5.0,), (4.0,)])
    faults: list[Exception] = []
    queue = WaitingQueue(Ranking(Broken(lambda: next(answers)), faults.append))
    for id in (1, 2, 3):
        queue.push(request(id, arrival=float(id)), 0.0)
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
        queue.push(request(id, arrival=float(id)), 0.0)
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
        scheduler.add(request(id))
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
    requests = [request(id) for id in range(1000)]
    for r in requests:
        queue.push(r, 0.0)
    for r in requests[:990]:
        queue.remove(r)
    assert len(queue) == 10
    assert queue.entries <= 2 * 10 + 64
    assert {r.id for r in queue} == set(range(990, 1000))
    first = queue.peek(0.0)
    assert first is not None
    assert first.id == 990
    queue.remove(first)
    queue.push(first, 0.0)
    again = queue.peek(0.0)
    assert again is first
