"""Layers with a window: what requests hold, and prefixes that still hit."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

from asyncinfer.cache import KVGroupSpec
from asyncinfer.params import SamplingParams
from asyncinfer.scheduler import Sequence
from asyncinfer.testing.simulation import Simulation

Greedy = Callable[..., SamplingParams]
PROMPT = [1 + (7 * i) % 98 for i in range(100)]


def held(sim: Simulation, tracks: list[Any]) -> list[int]:
    tables = [track.sequence.tables for track in tracks]
    return [table[1].held for table in tables if table]


def test_a_sequence_holds_its_window_and_one_chunk(
    make: Callable[..., Simulation], greedy: Greedy
) -> None:
    sim = make(blocks=64, context=200, budget=16, windows=[KVGroupSpec(64, window=12)])
    tracks = sim.submit(PROMPT, greedy(60))
    most = 0
    while sim.live():
        sim.step()
        most = max([most, *held(sim, tracks)])
    # Three blocks of window, four of a chunk of 16 tokens.
    assert most <= 3 + 4
    assert len(tracks[0].tokens) == 60
    sim.drain()


def test_many_sequences_in_the_pages_of_their_windows(
    make: Callable[..., Simulation], greedy: Greedy
) -> None:
    # Eight sequences of 160 tokens in pages for 8 * (12 + 8) tokens and a chunk.
    sim = make(blocks=400, context=200, budget=16, windows=[KVGroupSpec(8 * 5 + 4, window=12)])
    for i in range(8):
        sim.submit([*PROMPT[i:], *PROMPT[:i]], greedy(60))
    together = 0
    while sim.live():
        sim.step()
        together = max(together, sim.scheduler.stats().running)
    assert (together, sim.scheduler.counters.preemptions) == (8, 0)
    sim.drain()


def test_a_shared_prefix_longer_than_the_window_still_hits(
    make: Callable[..., Simulation], greedy: Greedy
) -> None:
    sim = make(blocks=128, context=200, windows=[KVGroupSpec(64, window=12)])
    sim.submit([*PROMPT, 5, 6], greedy(8))
    sim.run_until(lambda: not sim.live())
    (track,) = sim.submit([*PROMPT, 9], greedy(8))
    sim.run_until(lambda: not sim.live())
    assert track.sequence.cached_tokens == 100
    assert sim.scheduler.stats().window_pages_free + sim.scheduler.stats().window_pages_cached == 64
    sim.drain()


def test_a_prefix_whose_pages_went_is_computed_again_and_then_hits(
    make: Callable[..., Simulation], greedy: Greedy
) -> None:
    sim = make(blocks=256, context=200, windows=[KVGroupSpec(12, window=12)])
    sim.submit(PROMPT, greedy(1))
    sim.run_until(lambda: not sim.live())
    for i in range(1, 4):
        sim.submit([100 - i, *PROMPT], greedy(1))
        sim.run_until(lambda: not sim.live())
    (again,) = sim.submit([*PROMPT, 9], greedy(1))
    sim.run_until(lambda: not sim.live())
    assert again.sequence.cached_tokens < 100
    (third,) = sim.submit([*PROMPT, 8], greedy(1))
    sim.run_until(lambda: not sim.live())
    assert third.sequence.cached_tokens == 100
    sim.drain()


def test_pages_that_are_passed_by_do_not_drive_out_those_that_are_asked_for(
    make: Callable[..., Simulation], greedy: Greedy
) -> None:
    sim = make(blocks=256, context=200, windows=[KVGroupSpec(20, window=12)])
    hits = []
    for first in (0, 0, 70, 90, 0):
        # Prompts of one beginning, and others.
        prompt = [*PROMPT, 5] if not first else [first, *PROMPT, 5]
        (track,) = sim.submit(prompt, greedy(20))
        sim.run_until(lambda: not sim.live())
        hits.append(track.sequence.cached_tokens)
    assert hits == [0, 100, 0, 0, 100]
    sim.drain()


def test_the_least_pages_serve_one_after_the_other(
    make: Callable[..., Simulation], greedy: Greedy
) -> None:
    sim = make(blocks=256, context=200, windows=[KVGroupSpec(5, window=12)])
    for i in range(3):
        sim.submit([*PROMPT[i:], *PROMPT[:i]], greedy(30, n=2))
    sim.run_until(lambda: not sim.live(), limit=3000)
    sim.drain()


def test_answers_of_one_prompt_take_over_its_window(
    make: Callable[..., Simulation], greedy: Greedy
) -> None:
    sim = make(blocks=128, context=200, windows=[KVGroupSpec(64, window=12)])
    sim.submit(PROMPT[:98], greedy(30, n=4))
    sim.run_until(lambda: not sim.live())
    assert sim.scheduler.counters.forks == 3
    assert sim.computed_tokens < 98 + 4 * 32
    sim.drain()


def test_two_windows_in_one_model(make: Callable[..., Simulation], greedy: Greedy) -> None:
    windows = [KVGroupSpec(64, window=12), KVGroupSpec(40, window=30)]
    sim = make(blocks=256, context=200, budget=16, windows=windows)
    first = sim.submit(PROMPT[:98], greedy(40, n=2))
    most = [0, 0]
    while sim.live():
        sim.step()
        for track in first:
            held = [table.held for table in track.sequence.tables[1:]] or [0, 0]
            most = [max(pair) for pair in zip(most, held, strict=True)]
    # The blocks of a window, and four of a chunk of 16 tokens.
    assert most[0] <= 3 + 4
    assert most[0] < most[1] <= 8 + 4
    assert sim.scheduler.counters.forks == 1
    (again,) = sim.submit([*PROMPT[:96], 9], greedy(40))
    sim.run_until(lambda: not sim.live())
    assert again.sequence.cached_tokens == 96
    sim.drain()


def test_a_group_that_is_full_holds_up_all(make: Callable[..., Simulation], greedy: Greedy) -> None:
    windows = [KVGroupSpec(64, window=12), KVGroupSpec(10, window=30)]
    sim = make(blocks=256, context=200, windows=windows)
    for i in range(3):
        sim.submit([*PROMPT[i:], *PROMPT[:i]], greedy(30))
    together = 0
    while sim.live():
        sim.step()
        together = max(together, sim.scheduler.stats().running)
    assert together == 1
    sim.drain()


def test_a_guided_pair_goes_on_in_the_pages_there_are(
    make: Callable[..., Simulation], greedy: Greedy
) -> None:
    # Both prompts have room in one step, and 24 of their 49 pages in the windows' group.
    sim = make(blocks=64, context=200, budget=192, windows=[KVGroupSpec(24, window=12)])
    of = partial(Sequence, seed=0, arrival=0.0)
    guide = of(1, PROMPT[4:], greedy(), max_total=104)
    sequence = of(0, PROMPT, greedy(guidance_scale=2.0), max_total=108, guide=guide)
    sim.scheduler.add(sequence)
    while sim.scheduler.has_work:
        step = sim.scheduler.schedule(0.0)
        assert step is not None
        sim.scheduler.update(step, sim.runner.collect(sim.runner.launch(step)), 0.0)
    answer = sequence.tokens[sequence.prompt_len :]
    assert len(answer) == 8
    assert guide.tokens[guide.prompt_len :] == answer[:-1]
    sim.drain()
