"""What each shipped policy keeps that another would not."""

from __future__ import annotations

import json
from random import Random

import pytest

from asyncinfer.cache.policies import ARC, LFU, LRU, S3FIFO, TTL, CostAware, PrefixLHD, TailFirst
from asyncinfer.cache.policies.lifetimes import AGES, Lifetimes, age_class, age_start
from asyncinfer.cache.policies.ranked import Ranked
from asyncinfer.protocols import CachedBlock, EvictionPolicy
from asyncinfer.testing import CacheHarness


def serve(cache: CacheHarness, *prompt: int, scope: str = "", now: float = 0.0) -> int:
    return cache.serve(cache.request(prompt, scope), now)


def small(policy: EvictionPolicy, blocks: int) -> CacheHarness:
    return CacheHarness(blocks, policy, block_size=1)


def scan(cache: CacheHarness, count: int, start: int = 1_000) -> None:
    """Prompts that nobody repeats."""
    for number in range(start, start + count):
        serve(cache, number)


@pytest.mark.parametrize("policy", [LFU, S3FIFO, ARC, PrefixLHD])
def test_a_scan_does_not_flush_what_is_reused(policy: type[EvictionPolicy]) -> None:
    kept = {}
    for kind in (policy, LRU):
        cache = small(kind(), 20)
        for number in range(200):
            serve(cache, 1, 2)
            scan(cache, 12, 1_000 + 12 * number)
        scan(cache, 10, 9_000)
        kept[kind] = serve(cache, 1, 2)
    assert kept == {policy: 2, LRU: 0}


def test_lfu_prefers_few_uses_then_age() -> None:
    cache = small(LFU(), 4)
    for prompt in (1, 1, 2, 3, 3, 4):
        serve(cache, prompt)
    serve(cache, 5)
    assert [serve(cache, prompt) for prompt in (1, 3, 4, 5)] == [1, 1, 1, 1]


def test_ttl_by_scope() -> None:
    cache = small(TTL(100.0, {"batch": 5.0}), 3)
    serve(cache, 1, now=0.0)
    serve(cache, 2, scope="batch", now=50.0)
    serve(cache, 3, now=60.0)
    # The batch's time is up, though it was used after the first.
    serve(cache, 4, now=61.0)
    assert serve(cache, 1, now=62.0) == 1
    assert serve(cache, 2, scope="batch", now=63.0) == 0


@pytest.mark.parametrize(
    "make",
    [
        lambda: TTL(0.0),
        lambda: TTL(float("inf")),
        lambda: TTL(1.0, {"x": -1.0}),
        lambda: S3FIFO(0.0),
        lambda: S3FIFO(1.0),
        lambda: CostAware(0.0),
        lambda: CostAware(float("nan")),
    ],
)
def test_options_are_checked(make: object) -> None:
    with pytest.raises(ValueError, match="above 0"):
        make()  # type: ignore[operator]


@pytest.mark.parametrize("policy", [TailFirst, CostAware, PrefixLHD])
def test_a_prefix_is_never_broken_in_the_middle(policy: type[EvictionPolicy]) -> None:
    rng = Random(1)
    cache = small(policy(), 60)
    prompts = [tuple(rng.randrange(3) for _ in range(rng.randint(1, 12))) for _ in range(400)]
    for prompt in prompts:
        serve(cache, *prompt)
        held = cache.cache.by_block
        for entry in held.values():
            assert isinstance(entry.parent, tuple) or entry.parent.block in held


def test_one_answer_may_hold_a_whole_prompt() -> None:
    policy = TailFirst()
    cache = small(policy, 10)
    serve(cache, 1, 2, 3, 4)
    serve(cache, 5)
    depths = [cache.cache.by_block[block].depth for block in policy.victims(5)]
    assert depths == [3, 2, 1, 0, 0]


def test_leaves_in_use_by_others_copies_do_not_stop_eviction() -> None:
    cache = small(TailFirst(), 6)
    first, second = cache.request([1, 2]), cache.request([1, 2, 3])
    assert cache.open(first)
    assert cache.open(second)
    cache.commit(first)
    cache.commit(second)
    cache.close(first)
    # 3 hangs on the blocks of the first request and is in use.
    assert cache.open(cache.request([7, 8, 9]))


def test_what_is_dear_to_compute_stays() -> None:
    cache = small(CostAware(balance=1.0), 9)
    serve(cache, *range(8))
    serve(cache, 100)
    serve(cache, 101)
    assert serve(cache, *range(8)) == 8


def test_arc_remembers_what_it_gave_up() -> None:
    kept = {}
    for kind in (ARC, LRU):
        cache = small(kind(), 4)
        for prompt in (1, 1, 2, 2, 3, 4, 5):
            serve(cache, prompt)
        serve(cache, 3)
        scan(cache, 6)
        kept[kind] = serve(cache, 3)
    assert kept == {ARC: 1, LRU: 0}


def test_ranked_is_a_sorted_list() -> None:
    rng, ranked, model = Random(1), Ranked(), dict[int, tuple[int, int]]()
    for step in range(3_000):
        block = rng.randrange(50)
        match rng.randrange(4):
            case 0 | 1:
                rank = rng.randrange(10)
                ranked.put(block, rank)
                model[block] = (rank, step)
            case 2:
                ranked.discard(block)
                model.pop(block, None)
            case 3:
                best = sorted(model, key=lambda each: model[each])
                assert ranked.lowest(5) == best[:5]
                if step % 2 and best:
                    assert ranked.pop() == (best[0], model.pop(best[0])[0])
        assert len(ranked) == len(model)
        assert (block in ranked) == (block in model)


def test_age_classes_are_half_octaves() -> None:
    for number in range(1, AGES):
        start = age_start(number)
        assert (age_class(start), age_class(start - 1)) == (number, number - 1)
    assert age_class(0) == 0
    assert age_class(10**12) == AGES - 1
    assert [age_start(number) for number in range(5)] == [0, 64, 96, 128, 192]


def test_density_is_that_of_a_known_distribution() -> None:
    """Uses come at a constant rate: what a block earns is that rate, whatever its age."""
    rng, lifetimes, rate = Random(1), Lifetimes(), 1 / 2_000
    for _ in range(15_000):
        lifetimes.ended(round(rng.expovariate(rate)), hit=True)
    lifetimes.learn()
    ages = range(age_class(100), age_class(6_000))
    assert [lifetimes.density[age] / rate for age in ages] == pytest.approx([1.0] * len(ages), 0.2)


def test_density_looks_ahead() -> None:
    """Nothing for a thousand ticks, then a sure use: worth more the nearer it comes."""
    lifetimes = Lifetimes()
    for _ in range(1_000):
        lifetimes.ended(1_500, hit=True)
    lifetimes.learn()
    density = lifetimes.density
    assert density[age_class(100)] < density[age_class(900)] < density[age_class(1_100)]
    assert density[age_class(1_100)] > 20 * density[age_class(5_000)]


def test_equal_lives_of_every_policy_are_equal() -> None:
    def life(policy: EvictionPolicy) -> str:
        rng, cache = Random(3), small(policy, 64)
        return json.dumps([serve(cache, *_prompt(rng)) for _ in range(300)])

    for kind in (ARC, LFU, LRU, S3FIFO, TTL, CostAware, PrefixLHD, TailFirst):
        assert life(kind()) == life(kind())


def _prompt(rng: Random) -> list[int]:
    return [rng.randrange(4) for _ in range(rng.randint(1, 10))]


def test_a_key_names_a_prefix_wherever_it_lies() -> None:
    seen: dict[bytes, set[int]] = {}

    class Watching(LRU):
        def published(self, block: CachedBlock) -> None:
            seen.setdefault(block.key, set()).add(block.depth)

    cache = small(Watching(), 4)
    for prompt in ((1, 2), (3, 4), (5, 6), (1, 2), (2, 1)):
        serve(cache, *prompt)
    assert len(seen) == 8
    assert sorted(map(sorted, seen.values())) == [[0]] * 4 + [[1]] * 4
