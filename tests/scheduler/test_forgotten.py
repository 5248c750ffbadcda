"""A request that has ended is held by nothing of the scheduler."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable

from asyncinfer.cache import KVGroupSpec
from asyncinfer.cache.state_pages import STATE_WINDOW
from asyncinfer.params import SamplingParams
from asyncinfer.scheduler import RunnerSpec, Sequence, Step
from asyncinfer.scheduler.slot_allocator import SlotAllocator
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


def test_what_the_runner_was_not_told_yet_of_a_slot_that_is_left() -> None:
    """Its next sequence may join in the step that would tell it."""
    spec = RunnerSpec(
        groups=(KVGroupSpec(8), KVGroupSpec(8, STATE_WINDOW, state=True)),
        block_size=4,
        max_slots=2,
        max_context=32,
        vocab_size=100,
        max_step_tokens=8,
    )
    slots = SlotAllocator(spec, None)
    params = SamplingParams()
    one, other = (
        Sequence(id, [1, 2, 3], params, max_total=32, seed=0, arrival=0.0) for id in range(2)
    )
    for sequence in (one, other):
        slots.allocate(sequence, ())
        slots.grow(sequence, 1)
        slots.grow_each([sequence])
        sequence.committed = sequence.computed = 3
        slots.force(sequence, [2, 3])
        slots.rewind(sequence)
    left, stays = one.slot, other.slot
    slots.vacate(one)
    assert one.committed == one.computed == 0
    step = Step(0)
    slots.flush(step)
    assert step.leaves == [left]
    assert [(forced.slot, forced.start) for forced in step.forced] == [(stays, 1)]
    for changes in step.groups:
        assert {slot for slot, _, _ in changes.grown} == {stays}
    assert [changes.rewound for changes in step.groups] == [[], [(stays, 3)]]
    # A rewound state alone is told as well.
    slots.rewind(other)
    step = Step(1)
    slots.flush(step)
    assert [changes.rewound for changes in step.groups] == [[], [(stays, 3)]]
