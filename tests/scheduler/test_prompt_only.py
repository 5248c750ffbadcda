"""A request with `max_tokens=0` ends when its prompt is computed, whatever goes on beside it."""

from __future__ import annotations

from collections.abc import Callable
from random import Random

import pytest

from asyncinfer.cache import KVGroupSpec
from asyncinfer.errors import InvalidRequest
from asyncinfer.params import SamplingParams
from asyncinfer.testing.simulation import Simulation, Track

Make = Callable[..., Simulation]
Greedy = Callable[..., SamplingParams]


def test_nothing_is_drawn(make: Make, greedy: Greedy) -> None:
    sim = make(budget=5)
    (track,) = sim.submit(range(1, 12), greedy(0))
    assert sim.run_until(lambda: track.ended is not None) == 3
    assert track.ended == "length"
    assert track.tokens == []
    assert sim.computed_tokens == 11
    assert sim.scheduler.counters.generated_tokens == 0
    sim.drain()


def test_its_blocks_are_cached(make: Make, greedy: Greedy) -> None:
    sim = make(block_size=4)
    sim.submit(range(1, 10), greedy(0))
    sim.drain()
    sim.submit(range(1, 10), greedy(2))
    sim.drain()
    assert sim.scheduler.counters.cached_tokens == 8


def test_a_prompt_may_fill_the_context(make: Make, greedy: Greedy) -> None:
    sim = make(context=16, block_size=4, blocks=4)
    sim.submit([1] * 16, greedy(0))
    sim.drain()
    with pytest.raises(InvalidRequest, match="at most 16 fit"):
        sim.submit([1] * 17, greedy(0))
    with pytest.raises(InvalidRequest, match="at most 15 fit"):
        sim.submit([1] * 16, greedy(1))


def test_a_full_block_asks_for_no_other(make: Make, greedy: Greedy) -> None:
    """In the step after its last token is launched, the pool has no block left, and it needs none:
    nobody is preempted for it."""
    sim = make(blocks=4, block_size=4, depth=2, cached=False, context=16)
    (other,) = sim.submit([1] * 7, greedy(2))
    sim.submit([2] * 8, greedy(0))
    sim.drain()
    assert sim.scheduler.counters.preemptions == 0
    assert len(other.tokens) == 2


@pytest.mark.parametrize("windows", [(), (KVGroupSpec(24, window=6),)])
@pytest.mark.parametrize("depth", [1, 2])
def test_beside_others_under_pressure(
    make: Make, greedy: Greedy, depth: int, windows: tuple[KVGroupSpec, ...]
) -> None:
    """Preempted, forked, following one another's prefixes, aborted: the simulation checks every
    invariant after each step, and that each ends once."""
    rng = Random(7)
    sim = make(blocks=16, block_size=4, budget=9, depth=depth, windows=windows)
    tracks: list[Track] = []
    for number in range(50):
        prompt = [1 + number % 3] * rng.randrange(1, 24)
        tracks += sim.submit(prompt, greedy(rng.choice((0, 0, 1, 40)), n=rng.choice((1, 1, 2))))
        for _ in range(rng.randrange(4)):
            sim.step()
        if rng.random() < 0.1:
            sim.abort(rng.choice(tracks))
    sim.drain()
    assert sim.scheduler.counters.preemptions > 0
    without = [track for track in tracks if track.sequence.prompt_only]
    assert {track.ended for track in without} == {"length", "aborted"}
    assert not any(track.tokens for track in without)


@pytest.mark.parametrize("steps", [1, 2])
def test_preempted_before_and_in_its_last_chunk(make: Make, greedy: Greedy, steps: int) -> None:
    sim = make(budget=8, depth=2, cached=False)
    (track,) = sim.submit([1] * 16, greedy(0))
    for _ in range(steps):
        assert sim.schedule()
    sim.scheduler.states.preempt(track.sequence)
    sim.drain()
    assert track.ended == "length"
    # The one whose last chunk was in flight is done with it.
    assert sim.computed_tokens == (24 if steps == 1 else 16)
