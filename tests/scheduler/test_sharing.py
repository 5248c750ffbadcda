"""Prefixes computed once: prefix hits, in-flight sharing, answers of the same prompt."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from asyncinfer.cache import PrefixCache
from asyncinfer.params import SamplingParams
from asyncinfer.scheduler import Sequence, SequenceState
from asyncinfer.scheduler.inflight_prefixes import InflightPrefixes
from asyncinfer.testing.simulation import Simulation, Track

Make = Callable[..., Simulation]
Greedy = Callable[..., SamplingParams]


def test_a_full_hit_leaves_one_token_to_compute(make: Make, greedy: Greedy) -> None:
    sim = make()
    sim.submit(range(1, 17), greedy(1))
    sim.drain()
    again = sim.submit(range(1, 17), greedy(1))[0]
    sim.drain()
    assert again.sequence.cached_tokens == 12
    assert sim.computed_tokens == 16 + 4


def test_scopes_share_nothing(make: Make, greedy: Greedy) -> None:
    # fault 51
    sim = make()
    for scope in ("", "a", "b"):
        sim.submit(range(1, 17), greedy(2), scope=scope)
        sim.drain()
    assert (sim.scheduler.counters.cached_tokens, sim.scheduler.counters.shared) == (0, 0)


@pytest.mark.parametrize("depth", [1, 2])
def test_a_prefix_being_computed_is_waited_for(make: Make, greedy: Greedy, depth: int) -> None:
    sim = make(budget=8, context=128, depth=depth)
    prefix = list(range(1, 41))
    first = sim.submit([*prefix, 50], greedy(2))[0]
    sim.step()
    followers = [sim.submit([*prefix, 60 + i], greedy(2))[0] for i in range(5)]
    sim.drain()
    # One step at a time, the leader takes the whole budget until its prefix is there.
    assert sim.scheduler.counters.shared == (5 if depth == 2 else 0)
    assert [track.sequence.cached_tokens for track in followers] == [40] * 5
    assert sim.computed_tokens == 41 + 1 + 5 * 2
    assert first.sequence.cached_tokens == 0


def test_two_that_arrive_together_compute_their_prefix_once(make: Make, greedy: Greedy) -> None:
    sim = make()
    for suffix in (50, 60):
        sim.submit([*range(1, 21), suffix], greedy(1))
    sim.drain()
    assert sim.computed_tokens == 21 + 1


def leading(make: Make, greedy: Greedy) -> tuple[Simulation, Track, list[int]]:
    """A request whose whole prompt is in flight, with room for another step."""
    sim = make(budget=64, context=128, depth=2)
    prefix = list(range(1, 41))
    leader = sim.submit([*prefix, 50], greedy(8))[0]
    sim.schedule()
    return sim, leader, prefix


def test_followers_do_not_block_others(make: Make, greedy: Greedy) -> None:
    sim, leader, prefix = leading(make, greedy)
    follower = sim.submit([*prefix, 60], greedy(2))[0]
    other = sim.submit([99], greedy(2))[0]
    sim.schedule()
    assert follower.sequence.following is leader.sequence
    assert other.sequence.state is SequenceState.RUNNING
    assert (sim.scheduler.stats().running, sim.scheduler.stats().waiting) == (2, 1)
    sim.drain()


@pytest.mark.parametrize("fate", ["abort", "pause", "preempt"])
def test_followers_go_on_when_their_leader_does_not(make: Make, greedy: Greedy, fate: str) -> None:
    sim, leader, prefix = leading(make, greedy)
    followers = [sim.submit([*prefix, 60 + i], greedy(2))[0] for i in range(2)]
    sim.schedule()
    assert sim.scheduler.counters.shared == 2
    if fate == "preempt":
        sim.scheduler.states.preempt(leader.sequence)
    else:
        getattr(sim, fate)(leader)
    sim.run_until(lambda: all(track.ended for track in followers))
    assert sim.computed_tokens < 3 * 40, "one of them led the other"
    sim.drain()


def test_a_follower_can_be_aborted_or_paused(make: Make, greedy: Greedy) -> None:
    sim, _, prefix = leading(make, greedy)
    aborted, paused, other = (sim.submit([*prefix, 60 + i], greedy(2))[0] for i in range(3))
    sim.schedule()
    assert sim.scheduler.counters.shared == 3
    sim.abort(aborted)
    sim.pause(paused)
    sim.run_until(lambda: other.ended is not None)
    assert paused.tokens == []
    sim.drain()
    assert len(paused.tokens) == 2


def test_a_wait_ends_with_the_part_that_is_shared() -> None:
    following = InflightPrefixes(block_size=4)
    cache = PrefixCache(4)

    def sequence(id: int, tokens: list[int]) -> Sequence:
        keys = cache.keys(tokens)
        params = SamplingParams()
        return Sequence(id, tokens, params, max_total=99, seed=0, arrival=0.0, keys=keys)

    prompt = list(range(1, 25))
    leader = sequence(1, prompt)
    following.lead(leader)
    near, far = sequence(2, [*prompt[:9], 99]), sequence(3, prompt)
    assert following.ahead(sequence(4, [99] * 9), 0, 8) is None
    assert following.ahead(sequence(5, prompt[:4]), 0, 3) is None, "its last token is its own"
    assert following.ahead(near, 0, 9) == (leader, 8)
    assert following.ahead(far, 0, 23) == (leader, 20)
    following.follow(near, leader, 8)
    following.follow(far, leader, 20)
    leader.published, leader.committed = 1, 7
    following.lead(leader)
    assert following.advance(leader) == []
    assert following.ahead(sequence(6, prompt), 1, 23) == (leader, 20)
    leader.published, leader.committed = 2, 11
    assert following.advance(leader) == [near]
    assert near.following is None
    assert following.dissolve(leader) == [far]
    assert not following.followers
    assert not following.leaders


@pytest.mark.parametrize("depth", [1, 2])
@pytest.mark.parametrize("prompt_len", [1, 2, 4, 5, 8, 11])
@pytest.mark.parametrize("cached", [True, False])
def test_answers_share_their_prompt(
    make: Make, greedy: Greedy, prompt_len: int, cached: bool, depth: int
) -> None:
    sim = make(depth=depth, cached=cached)
    params = SamplingParams(n=4, max_tokens=6, temperature=1.0)
    answers = sim.submit(range(1, prompt_len + 1), params)
    copies: set[tuple[int, int]] = set()
    while sim.step():
        assert sim.plan is not None
        copies.update(copy for group in sim.plan.groups for copy in group.copies)
    assert sim.scheduler.counters.forks == 3
    # The prompt once, the last prompt token once more for every other answer.
    assert sim.computed_tokens == prompt_len + 3 + 4 * 5
    assert len(copies) == (3 if (prompt_len - 1) % 4 else 0)
    assert len({tuple(track.tokens) for track in answers}) == 4
    assert sim.scheduler.counters.prompt_tokens == prompt_len
    sim.drain()


@pytest.mark.parametrize("cached", [True, False])
def test_answers_go_on_when_the_first_one_ends_early(
    make: Make, greedy: Greedy, cached: bool
) -> None:
    sim = make(slots=1, cached=cached)
    answers = sim.submit(range(1, 11), greedy(3, n=3))
    sim.drain()
    assert sim.scheduler.counters.forks == 0
    assert [len(track.tokens) for track in answers] == [3, 3, 3]
    # Alone, they still find what the first one left in the cache.
    assert sim.computed_tokens == 12 + 2 * ((12 - 8) if cached else 12)


def test_answers_go_on_when_the_first_one_is_aborted_or_paused(make: Make, greedy: Greedy) -> None:
    for act in ("abort", "pause"):
        sim = make(budget=4)
        first, *others = sim.submit(range(1, 11), greedy(3, n=3))
        sim.step()
        getattr(sim, act)(first)
        sim.run_until(lambda others=others: all(track.ended for track in others))  # type: ignore[misc]
        sim.drain()


@pytest.mark.parametrize("depth", [1, 2])
def test_prompt_logprobs_come_once_each_in_spite_of_hits_and_preemptions(
    make: Make, greedy: Greedy, depth: int
) -> None:
    sim = make(budget=6, depth=depth)
    prompt = list(range(1, 21))
    sim.submit(prompt, greedy(1))
    sim.drain()
    track = sim.submit(prompt, greedy(2, prompt_logprobs=0))[0]
    sim.step()
    sim.step()
    assert 0 < len(track.scored) < 19
    sim.scheduler.states.preempt(track.sequence)
    sim.drain()
    assert track.scored == list(range(1, 20))
    assert track.sequence.preemptions == 1
    assert track.sequence.cached_tokens == 0


def test_only_the_first_answer_reports_prompt_logprobs(make: Make, greedy: Greedy) -> None:
    sim = make()
    first, second = sim.submit(range(1, 11), greedy(2, n=2, prompt_logprobs=0))
    sim.drain()
    assert (len(first.scored), len(second.scored)) == (9, 0)


def test_answers_share_the_prompt_until_they_draw(make: Make, greedy: Greedy) -> None:
    sim = make(budget=8, slots=2, context=128)
    prompt = list(range(1, 25))
    tracks = sim.submit(prompt, greedy(4, n=4))
    sequences = [track.sequence for track in tracks]
    assert all(sequence.tokens is prompt for sequence in sequences)
    sim.run_until(lambda: len(tracks[0].tokens) == 1)
    assert sequences[0].tokens == [*prompt, *tracks[0].tokens]
    assert all(sequence.tokens is prompt for sequence in sequences[2:])
    assert len(prompt) == 24
    sim.drain()
    assert len(prompt) == 24


def test_a_prompt_paused_before_its_last_token_stays_as_it_was(make: Make, greedy: Greedy) -> None:
    sim = make(budget=8, blocks=32)
    prompt = list(range(1, 10))
    tracks = sim.submit(prompt, greedy(4, n=2))
    sim.step()
    assert tracks[0].sequence.computed == 8
    sim.pause(tracks[0])
    sim.resume(tracks[0])
    sim.drain()
    assert prompt == list(range(1, 10))
