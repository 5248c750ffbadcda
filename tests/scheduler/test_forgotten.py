"""A request that has ended is held by nothing of the scheduler."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable

from asyncinfer.params import SamplingParams
from asyncinfer.scheduler import Step
from asyncinfer.testing.simulation import Simulation, Track

Make = Callable[..., Simulation]
Greedy = Callable[..., SamplingParams]


class Owner:
    """What a request refers to, and whatever holds the request with it."""


def watched(track: Track) -> weakref.ref[Owner]:
    owner = track.sequence.owner = Owner()
    return weakref.ref(owner)


def test_one_that_was_aborted_in_the_queue(make: Make, greedy: Greedy) -> None:
    sim = make(slots=1)
    for _ in range(4):
        sim.submit(range(1, 9), greedy(30))
    sim.step()
    track = sim.submit(range(1, 9), greedy(30))[0]
    owner = watched(track)
    sim.abort(track)
    sim.forget()
    del track
    gc.collect()
    assert owner() is None


def test_one_that_ran_and_left_the_queue(make: Make, greedy: Greedy) -> None:
    sim = make(slots=1)
    first = sim.submit(range(1, 9), greedy(2))[0]
    owner = watched(first)
    others = [sim.submit(range(9, 17), greedy(30))[0] for _ in range(3)]
    sim.run_until(lambda: others[0].sequence.slot >= 0)
    assert first.ended is not None
    sim.forget()
    del first
    gc.collect()
    assert owner() is None


def test_one_that_the_device_had_no_room_for(make: Make, greedy: Greedy) -> None:
    launches = iter(range(1 << 30))
    sim = make(no_room=lambda plan: next(launches) == 0)
    track = sim.submit(range(1, 9), greedy(2))[0]
    owner = watched(track)
    sim.step()
    sim.abort(track)
    sim.forget()
    sim.plan = None
    del track
    gc.collect()
    assert owner() is None


def test_one_whose_row_failed_after_there_had_been_no_room(make: Make, greedy: Greedy) -> None:
    launches = iter(range(1 << 30))

    def failing(plan: Step) -> dict[int, Exception]:
        return {0: ArithmeticError("NaN logits")}

    sim = make(no_room=lambda plan: next(launches) == 0, failing=failing)
    track = sim.submit(range(1, 9), greedy(2))[0]
    owner = watched(track)
    sim.run_until(lambda: not sim.live())
    assert track.ended == "failed"
    sim.forget()
    sim.plan = None
    del track
    gc.collect()
    assert owner() is None
