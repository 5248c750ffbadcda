"""Slow consumers: a paused request keeps its place until somebody needs it."""

from __future__ import annotations

from collections.abc import Callable

from asyncinfer.params import SamplingParams
from asyncinfer.scheduler import SequenceState
from asyncinfer.testing.simulation import Simulation

Make = Callable[..., Simulation]
Greedy = Callable[..., SamplingParams]


def test_only_the_paused_one_stops(make: Make, greedy: Greedy) -> None:
    # fault 5, scheduler part
    sim = make()
    slow, fast = sim.submit([1], greedy(20))[0], sim.submit([2], greedy(20))[0]
    sim.step()
    sim.pause(slow)
    sim.pause(slow)
    for _ in range(5):
        sim.step()
    assert (len(slow.tokens), len(fast.tokens)) == (1, 6)
    assert (sim.scheduler.stats().running, sim.scheduler.stats().paused) == (1, 1)
    sim.resume(slow)
    sim.resume(slow)
    sim.step()
    assert (len(slow.tokens), len(fast.tokens)) == (2, 7)
    assert sim.scheduler.counters.preemptions == 0, "nobody needed its place"
    sim.drain()


def test_a_token_in_flight_is_still_committed(make: Make, greedy: Greedy) -> None:
    sim = make(depth=2)
    track = sim.submit([1], greedy(20))[0]
    sim.schedule()
    sim.schedule()
    sim.pause(track)
    assert not sim.schedule()
    sim.update()
    sim.update()
    assert len(track.tokens) == 2
    assert not sim.scheduler.has_work
    sim.drain()


def test_the_paused_are_the_first_victims_for_blocks(make: Make, greedy: Greedy) -> None:
    sim = make(blocks=7, cached=False)
    paused = sim.submit([1] * 8, greedy(8))[0]
    running = sim.submit([2] * 8, greedy(10))[0]
    sim.step()
    sim.pause(paused)
    sim.run_until(lambda: running.ended is not None)
    assert paused.sequence.preemptions == 0, "there was room beside it"
    third = sim.submit([3] * 24, greedy(1))[0]
    sim.step()
    assert paused.sequence.preemptions == 1
    assert paused.sequence.state is SequenceState.PAUSED
    assert third.ended == "length"
    sim.resume(paused)
    assert paused.sequence.state is SequenceState.WAITING
    sim.drain()
    assert len(paused.tokens) == 8


def test_the_paused_are_the_first_victims_for_slots(make: Make, greedy: Greedy) -> None:
    sim = make(slots=2)
    first, second = sim.submit([1], greedy(8))[0], sim.submit([2], greedy(8))[0]
    sim.step()
    sim.pause(first)
    third = sim.submit([3], greedy(2))[0]
    sim.step()
    assert len(third.tokens) == 1
    assert (first.sequence.preemptions, second.sequence.preemptions) == (1, 0)
    sim.drain()


def test_growth_takes_from_the_paused_before_the_running(make: Make, greedy: Greedy) -> None:
    sim = make(blocks=6, cached=False)
    old, paused, young = (sim.submit([first], greedy(14))[0] for first in (1, 2, 3))
    for _ in range(4):
        sim.step()
    sim.pause(paused)
    sim.run_until(lambda: sim.scheduler.counters.preemptions > 0)
    assert paused.sequence.preemptions == 1
    assert old.sequence.preemptions == young.sequence.preemptions == 0
    sim.drain()


def test_a_waiting_request_can_be_paused(make: Make, greedy: Greedy) -> None:
    sim = make(slots=1)
    first, second = sim.submit([1], greedy(3))[0], sim.submit([2], greedy(3))[0]
    sim.step()
    sim.pause(second)
    sim.run_until(lambda: first.ended is not None)
    assert not sim.step()
    assert second.sequence.slot < 0
    sim.resume(second)
    sim.drain()
    assert len(second.tokens) == 3


def test_paused_and_resumed_while_it_leaves(make: Make, greedy: Greedy) -> None:
    sim = make(blocks=4, depth=2, cached=False)
    a, b = sim.submit([1, 2, 3], greedy(12))[0], sim.submit([4, 5, 6], greedy(12))[0]
    sim.schedule()
    for _ in range(100):
        sim.schedule()
        if b.sequence.state is SequenceState.LEAVING:
            break
        sim.update()
    sim.pause(b)
    assert sim.scheduler.stats().paused == 1
    sim.resume(b)
    assert sim.scheduler.stats().waiting == 1
    sim.pause(b)
    sim.run_until(lambda: a.ended is not None)
    assert b.sequence.state is SequenceState.PAUSED
    sim.drain()
    assert len(b.tokens) == 12


def test_an_answer_does_not_wait_for_a_sibling_that_is_paused_while_it_leaves(
    make: Make, greedy: Greedy
) -> None:
    sim = make(budget=4, depth=2)
    first, second = sim.submit(range(1, 11), greedy(3, n=2))
    sim.schedule()
    sim.scheduler.states.preempt(first.sequence)
    assert first.sequence.state is SequenceState.LEAVING
    assert not sim.schedule()
    assert second.sequence.following is first.sequence
    sim.pause(first)
    sim.run_until(lambda: second.ended is not None)
    assert first.sequence.state is SequenceState.PAUSED
    sim.drain()
    assert len(first.tokens) == 3
