"""Requests that can never fit are refused before any state exists."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest

from asyncinfer.cache import STATE_WINDOW, KVGroupSpec
from asyncinfer.errors import InvalidRequest
from asyncinfer.params import SamplingParams
from asyncinfer.scheduler import RunnerSpec, check_fits, check_guided
from asyncinfer.testing.simulation import Simulation

Make = Callable[..., Simulation]
Greedy = Callable[..., SamplingParams]


def spec(blocks: int, context: int) -> RunnerSpec:
    return RunnerSpec(
        (KVGroupSpec(blocks),), 4, 2, max_context=context, vocab_size=9, max_step_tokens=8
    )


@pytest.mark.parametrize(
    ("prompt_len", "max_tokens", "total"),
    [
        (1, 1, 2),
        (1, None, 20),
        (10, 5, 15),
        (10, 10, 20),
        (10, 11, 20),
        (10, 2**31 - 1, 20),
        (19, None, 20),
        (19, 1, 20),
    ],
)
def test_the_answer_is_clipped_to_the_context(
    prompt_len: int, max_tokens: int | None, total: int
) -> None:
    assert check_fits(spec(blocks=100, context=20), prompt_len, max_tokens) == total


@pytest.mark.parametrize("prompt_len", [20, 21, 10**9])
@pytest.mark.parametrize("max_tokens", [None, 1])
def test_a_prompt_longer_than_the_context_is_refused(
    prompt_len: int, max_tokens: int | None
) -> None:
    # fault 27
    with pytest.raises(InvalidRequest) as caught:
        check_fits(spec(blocks=100, context=20), prompt_len, max_tokens)
    assert caught.value.field == "prompt"
    assert str(prompt_len) in str(caught.value)
    assert "19" in caught.value.bound


@pytest.mark.parametrize("prompt_len", [13, 19])
def test_a_prompt_larger_than_the_pool_is_refused(prompt_len: int) -> None:
    # fault 28
    with pytest.raises(InvalidRequest) as caught:
        check_fits(spec(blocks=3, context=20), prompt_len, None)
    assert caught.value.field == "prompt"
    assert "12" in caught.value.bound


def test_an_answer_larger_than_the_pool_is_refused_if_asked_for_and_else_clipped() -> None:
    # fault 28
    small = spec(blocks=3, context=20)
    assert check_fits(small, 5, None) == 13, "the last token is never computed"
    assert check_fits(small, 5, 8) == 13
    with pytest.raises(InvalidRequest) as caught:
        check_fits(small, 5, 9)
    assert (caught.value.field, caught.value.value) == ("max_tokens", 9)
    assert "8" in caught.value.bound
    assert check_fits(small, 12, 1) == 13


def test_an_empty_prompt_is_refused() -> None:
    with pytest.raises(InvalidRequest, match="at least one token"):
        check_fits(spec(blocks=3, context=20), 0, None)


@pytest.mark.parametrize("depth", [1, 2])
@pytest.mark.parametrize("prompt_len", [1, 4, 11, 12])
def test_the_largest_request_that_fits_runs_to_its_end(
    make: Make, greedy: Greedy, prompt_len: int, depth: int
) -> None:
    # fault 28: never a deadlock, also beside others.
    sim = make(blocks=3, depth=depth)
    tracks = [
        sim.submit(range(first, first + prompt_len), greedy(None))[0] for first in (1, 20, 40)
    ]
    sim.drain()
    assert [len(track.tokens) for track in tracks] == [13 - prompt_len] * 3


@pytest.mark.parametrize(
    ("window", "state", "pages", "bound"),
    [
        (12, False, 10, "the KV of layers with a window holds one"),
        (STATE_WINDOW, True, 6, "the pages of states hold one"),
    ],
)
def test_two_sequences_in_step_need_the_pages_of_two(
    window: int, state: bool, pages: int, bound: str
) -> None:
    def fits(pages: int) -> int:
        groups = KVGroupSpec(64), KVGroupSpec(pages, window, state=state)
        return check_guided(replace(spec(64, 64), groups=groups, guides=True), 9, 5, 20, 11)

    assert fits(pages) == 20
    with pytest.raises(InvalidRequest, match=bound) as caught:
        fits(pages - 1)
    assert caught.value.field == "guidance_scale"
