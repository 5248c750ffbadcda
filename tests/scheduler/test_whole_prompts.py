"""Prompts that a runner takes in one step only."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from asyncinfer.errors import InvalidRequest
from asyncinfer.scheduler import Step
from asyncinfer.testing.simulation import Simulation

Make = Callable[..., Simulation]


def prompts(*lengths: int) -> list[list[int]]:
    return [[first, *range(1, length)] for first, length in enumerate(lengths, 1)]


def test_no_prompt_is_parted(make: Make, greedy: Callable[..., Any]) -> None:
    steps: list[list[int]] = []

    def note(plan: Step) -> bool:
        steps.append(list(plan.counts))
        return False

    sim = make(whole_prompts=True, cached=False, budget=32, no_room=note)
    tracks = [sim.submit(each, greedy(0))[0] for each in prompts(20, 11, 2, 32, 31, 1)]
    sim.drain()
    assert steps == [[20, 11], [2], [32], [31, 1]]
    assert all(track.ended == "length" for track in tracks)


def test_a_prompt_that_has_no_room_is_tried_whole_again(
    make: Make, greedy: Callable[..., Any]
) -> None:
    steps: list[list[int]] = []

    def no_room(plan: Step) -> bool:
        steps.append(list(plan.counts))
        return plan.tokens > 25

    sim = make(whole_prompts=True, cached=False, budget=32, no_room=no_room)
    tracks = [sim.submit(each, greedy(0))[0] for each in prompts(20, 11, 30)]
    sim.drain()
    assert steps == [[20, 11], [20], [11], [30], [30]]
    assert [track.ended for track in tracks] == ["length", "length", "failed"]


def test_answers_and_scores_are_refused(make: Make) -> None:
    check = make(whole_prompts=True, cached=False).scheduler.check_fits
    assert check(5, 0) == 5
    with pytest.raises(InvalidRequest, match="max_tokens=1: must be 0"):
        check(5, 1)
    with pytest.raises(InvalidRequest, match="max_tokens=None: must be 0"):
        check(5, None)
    with pytest.raises(InvalidRequest, match="prompt_logprobs=0: must be None"):
        check(5, 0, 0)
