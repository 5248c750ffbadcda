"""Continuous batching: what is in a step, when an answer ends, several steps in flight."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from asyncinfer.params import SamplingParams
from asyncinfer.scheduler.counters import Counters
from asyncinfer.testing.simulation import Simulation

Make = Callable[..., Simulation]
Greedy = Callable[..., SamplingParams]


def test_a_long_prompt_is_cut_into_chunks(make: Make, greedy: Greedy) -> None:
    sim = make(budget=8)
    sim.submit(range(1, 21), greedy(3))
    shapes = []
    while sim.step():
        assert sim.plan is not None
        shapes.append((sim.plan.starts, sim.plan.counts, sim.plan.samples))
    assert shapes == [
        ([0], [8], [0]),
        ([8], [8], [0]),
        ([16], [4], [1]),
        ([20], [1], [1]),
        ([21], [1], [1]),
    ]


def test_decodes_come_first_and_prompts_fill_the_rest(make: Make, greedy: Greedy) -> None:
    sim = make(budget=8)
    for first in (1, 11, 21):
        sim.submit([first, first + 1], greedy(9))
    sim.step()
    sim.submit(range(40, 52), greedy(9))
    sim.step()
    assert sim.plan is not None
    assert sim.plan.counts == [1, 1, 1, 5]
    assert sim.plan.samples == [1, 1, 1, 0]
    sim.step()
    assert sim.plan.counts == [1, 1, 1, 5]
    sim.step()
    assert sim.plan.counts == [1, 1, 1, 2]
    assert sim.plan.samples == [1, 1, 1, 1]


def test_requests_join_and_leave_between_steps(make: Make, greedy: Greedy) -> None:
    sim = make(slots=2)
    a, b, c = (sim.submit([first], greedy(n))[0] for first, n in ((1, 2), (2, 5), (3, 2)))
    sim.step()
    assert (sim.scheduler.stats().running, sim.scheduler.stats().waiting) == (2, 1)
    sim.step()
    assert a.ended == "length"
    sim.step()
    assert sim.plan is not None
    assert sim.plan.leaves == [0]
    assert sim.plan.joins[0].slot == 0
    assert sim.scheduler.sequence_at(0) is c.sequence
    sim.drain()
    assert b.ended == c.ended == "length"


def test_more_decodes_than_budget(make: Make, greedy: Greedy) -> None:
    sim = make(budget=3)
    for first in range(1, 7):
        sim.submit([first], greedy(4))
    sim.drain()
    assert all(track.ended == "length" for track in sim.tracks.values())


@pytest.mark.parametrize("depth", [1, 2, 3])
@pytest.mark.parametrize("max_tokens", [1, 2, 7])
def test_an_answer_has_exactly_max_tokens(
    make: Make, greedy: Greedy, depth: int, max_tokens: int
) -> None:
    sim = make(depth=depth)
    track = sim.submit([1, 2, 3], greedy(max_tokens))[0]
    sim.drain()
    assert (track.ended, len(track.tokens)) == ("length", max_tokens)
    assert sim.computed_tokens == 3 + max_tokens - 1, "the last token is never computed"
    assert sim.scheduler.counters.generated_tokens == max_tokens


@pytest.mark.parametrize("depth", [1, 2])
def test_a_stop_token_ends_an_answer(make: Make, greedy: Greedy, depth: int) -> None:
    sim = make(depth=depth)
    third = sim.runner.oracle([1, 2], greedy(8), 0, 3)[2]
    track = sim.submit([1, 2], greedy(8), stop_ids=frozenset((third,)))[0]
    sim.drain()
    assert track.ended == "stop"
    assert track.tokens[-1] == third, "the stop token is part of the tokens"
    assert len(track.tokens) <= 3


def test_no_stop_before_min_tokens(make: Make, greedy: Greedy) -> None:
    # The runner bars stop tokens that early; a sampler that draws one all the same ends nothing.
    sim = make()
    first, second = sim.runner.oracle([1, 2], greedy(8), 0, 2)
    track = sim.submit([1, 2], greedy(8, min_tokens=3), stop_ids=frozenset((first, second)))[0]
    sim.drain()
    assert len(track.tokens) >= 3


def test_finishing_in_flight_keeps_blocks_until_the_step_is_committed(
    make: Make, greedy: Greedy
) -> None:
    sim = make(depth=2, cached=False)
    track = sim.submit([1, 2, 3], greedy(8))[0]
    sim.schedule()
    sim.schedule()
    sim.abort(track)
    sim.abort(track)
    assert sim.scheduler.stats().blocks_free == 63
    assert sim.scheduler.has_work
    sim.update()
    assert sim.scheduler.stats().blocks_free == 63, "the second step still uses the block"
    sim.update()
    assert sim.scheduler.stats().blocks_free == 64
    assert not sim.scheduler.has_work
    assert track.tokens == []


def test_steps_are_committed_in_order(make: Make, greedy: Greedy) -> None:
    sim = make(depth=2)
    sim.submit([1], greedy(8))
    scheduler, runner = sim.scheduler, sim.runner
    first, second = scheduler.schedule(0.0), scheduler.schedule(0.0)
    assert first is not None
    assert second is not None
    runner.launch(first)
    handle = runner.launch(second)
    del handle
    with pytest.raises(AssertionError, match="in the order"):
        scheduler.update(second, runner.collect(first), 0.0)


def test_the_counters_add_up(make: Make, greedy: Greedy) -> None:
    sim = make()
    sim.submit(range(1, 11), greedy(4))
    sim.drain()
    sim.submit(range(1, 11), greedy(4))
    sim.drain()
    scheduler = sim.scheduler
    assert scheduler.counters == Counters(
        steps=8, generated_tokens=8, prompt_tokens=20, cached_tokens=8
    )
    assert (scheduler.stats().running, scheduler.stats().waiting, scheduler.stats().paused) == (
        0,
        0,
        0,
    )
    assert (
        scheduler.stats().blocks_total
        == scheduler.stats().blocks_free + scheduler.stats().blocks_cached
        == 64
    )
    assert scheduler.stats().blocks_cached == 3
