"""Rows that fail."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import pytest

from asyncinfer.params import SamplingParams
from asyncinfer.scheduler import Step
from asyncinfer.testing.simulation import Simulation

Make = Callable[..., Simulation]
Greedy = Callable[..., SamplingParams]


def fail_slot(slot: int, step: int) -> Callable[[Step], Mapping[int, Exception]]:
    def failing(plan: Step) -> Mapping[int, Exception]:
        if plan.number == step and slot in plan.slots:
            return {plan.slots.index(slot): ArithmeticError("NaN logits")}
        return {}

    return failing


@pytest.mark.parametrize("depth", [1, 2, 3])
@pytest.mark.parametrize("step", [0, 1, 4])
def test_only_the_failed_row_ends(make: Make, greedy: Greedy, step: int, depth: int) -> None:
    # fault 26
    sim = make(failing=fail_slot(1, step), depth=depth)
    tracks = [sim.submit([first], greedy(8))[0] for first in (1, 2, 3)]
    sim.drain()
    assert [track.ended for track in tracks] == ["length", "failed", "length"]
    assert len(tracks[1].tokens) == step


def test_its_blocks_are_not_published(make: Make, greedy: Greedy) -> None:
    # fault 26
    sim = make(failing=fail_slot(0, 1), budget=8)
    prompt = list(range(1, 25))
    failed = sim.submit(prompt, greedy(2))[0]
    sim.drain()
    assert failed.ended == "failed"
    assert sim.scheduler.stats().blocks_cached == 2, "those of the step before"
    again = sim.submit(prompt, greedy(2))[0]
    sim.drain()
    assert again.sequence.cached_tokens == 8
    assert again.ended == "length"


def test_the_reason_is_handed_on(make: Make, greedy: Greedy) -> None:
    sim = make(failing=fail_slot(0, 0))
    track = sim.submit([1], greedy(2))[0]
    plan = sim.scheduler.schedule(0.0)
    assert plan is not None
    sim.scheduler.update(plan, sim.runner.collect(sim.runner.launch(plan)), 0.0)
    assert plan.drawn == [None]
    [(sequence, error)] = plan.failed
    assert sequence is track.sequence
    assert isinstance(error, ArithmeticError)


def test_followers_and_forks_of_a_failed_request_go_on(make: Make, greedy: Greedy) -> None:
    sim = make(failing=fail_slot(0, 1), budget=8)
    prompt = list(range(1, 25))
    failed, *forks = sim.submit(prompt, greedy(2, n=3))
    follower = sim.submit([*prompt, 30], greedy(2))[0]
    sim.drain()
    assert failed.ended == "failed"
    assert [track.ended for track in [*forks, follower]] == ["length"] * 3


def test_nobody_forks_from_a_failed_request_whose_pages_a_step_still_uses(
    make: Make, greedy: Greedy
) -> None:
    sim = make(failing=fail_slot(0, 0), depth=2, cached=False)
    failed, fork = sim.submit(range(1, 9), greedy(2, n=2))
    sim.schedule()
    sim.schedule()
    sim.update()
    assert failed.ended == "failed"
    assert failed.sequence.slot >= 0
    sim.schedule()
    assert fork.sequence.slot >= 0
    assert sim.scheduler.counters.forks == 0
    sim.drain()
    assert fork.ended == "length"
