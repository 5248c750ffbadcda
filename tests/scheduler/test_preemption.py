"""Too few blocks: who has to go, who moves on."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from asyncinfer.params import SamplingParams
from asyncinfer.scheduler import Priority, SequenceState
from asyncinfer.testing.simulation import Simulation

Make = Callable[..., Simulation]
Greedy = Callable[..., SamplingParams]


@pytest.mark.parametrize("depth", [1, 2])
@pytest.mark.parametrize("cached", [True, False])
def test_preempted_requests_give_the_same_tokens(
    make: Make, greedy: Greedy, depth: int, cached: bool
) -> None:
    sim = make(blocks=12, depth=depth, cached=cached)
    tracks = [sim.submit([first, first], greedy(40))[0] for first in range(1, 6)]
    sim.drain()
    assert sim.scheduler.counters.preemptions > 0
    assert all(len(track.tokens) == 40 for track in tracks)
    assert tracks[0].sequence.preemptions == 0


def test_the_worst_ranked_goes_first(make: Make, greedy: Greedy) -> None:
    sim = make(blocks=8, policy=Priority(ageing=1e9), cached=False)
    low, high, mid = (
        sim.submit([first], greedy(30), priority=priority)[0]
        for first, priority in ((1, 0), (2, 2), (3, 1))
    )
    sim.run_until(lambda: sim.scheduler.counters.preemptions > 0)
    # The lowest priority is also the oldest running request, which is never a victim.
    assert mid.sequence.preemptions == 1
    assert low.sequence.preemptions == high.sequence.preemptions == 0
    sim.drain()


def test_the_oldest_always_moves_on(make: Make, greedy: Greedy) -> None:
    # fault 50: however urgent the others are, the oldest running request ends within its own time.
    sim = make(blocks=8, policy=Priority(ageing=1e9), cached=False)
    oldest = sim.submit([1], greedy(30))[0]
    sim.step()
    for first in range(2, 30):
        sim.submit([first] * 3, greedy(20), priority=9)
    steps = sim.run_until(lambda: oldest.ended is not None)
    assert sim.scheduler.counters.preemptions > 0
    assert steps == 29
    sim.drain()


@pytest.mark.parametrize("depth", [1, 2])
def test_no_preemption_storm(make: Make, greedy: Greedy, depth: int) -> None:
    # fault 50: forty requests over a pool for two of them. Work is not done over and over.
    sim = make(blocks=24, depth=depth, slots=8, cached=False)
    tracks = [sim.submit([first] * 8, greedy(40))[0] for first in range(1, 41)]
    sim.drain()
    useful = 40 * (8 + 39)
    assert all(len(track.tokens) == 40 for track in tracks)
    assert 0 < sim.scheduler.counters.preemptions <= 2 * len(tracks)
    assert sim.computed_tokens < 2 * useful
    assert max(track.sequence.preemptions for track in tracks) <= 4


def test_a_preempted_request_finds_its_own_prefix(make: Make, greedy: Greedy) -> None:
    sim = make(blocks=8)
    a = sim.submit(range(1, 13), greedy(16))[0]
    b = sim.submit(range(31, 43), greedy(16))[0]
    sim.drain()
    assert b.sequence.preemptions == 1
    assert a.tokens + b.tokens
    without_hits = 2 * (12 + 15) + len(b.sequence.tokens) - 1
    assert sim.computed_tokens < without_hits


def test_one_in_flight_leaves_when_its_step_is_committed(make: Make, greedy: Greedy) -> None:
    sim = make(blocks=4, depth=2, cached=False)
    a = sim.submit([1, 2, 3], greedy(12))[0]
    b = sim.submit([4, 5, 6], greedy(12))[0]
    sim.schedule()
    for _ in range(20):
        sim.schedule()
        if b.sequence.preemptions:
            break
        sim.update()
    assert b.sequence.state is SequenceState.LEAVING
    assert sim.scheduler.stats().waiting == 1
    drawn, blocks = len(b.tokens), list(b.sequence.tables[0].pages)
    assert blocks, "the step in flight uses them"
    sim.update()
    assert b.sequence.state is SequenceState.WAITING
    assert len(b.tokens) == drawn + 1, "what was in flight is not lost"
    assert sim.scheduler.stats().blocks_free >= len(blocks)
    assert a.sequence.preemptions == 0
    sim.drain()


def test_waiting_requests_do_not_preempt_running_ones(make: Make, greedy: Greedy) -> None:
    sim = make(slots=1, policy=Priority())
    first = sim.submit([1], greedy(10))[0]
    sim.step()
    urgent = sim.submit([2], greedy(2), priority=100)[0]
    sim.drain()
    assert sim.scheduler.counters.preemptions == 0
    assert len(first.tokens) == 10
    assert len(urgent.tokens) == 2
