"""The policy keeps the rules, does what it says, and works by its name."""

from __future__ import annotations

import asyncio

from asyncinfer_fair_share import FairShare

from asyncinfer import Engine
from asyncinfer.plugins import cache_policies
from asyncinfer.testing import CacheHarness, FakeModel, check_cache_policy


def test_it_keeps_the_rules() -> None:
    check_cache_policy(FairShare)


def test_a_flood_takes_nothing_from_others() -> None:
    cache = CacheHarness(40, FairShare(), block_size=1)
    quiet = list(range(10))
    cache.serve(cache.request(quiet, "quiet"))
    for start in range(100, 2000, 10):
        cache.serve(cache.request(range(start, start + 10), "loud"))
    assert cache.serve(cache.request(quiet, "quiet")) == 10


def test_shares_become_equal() -> None:
    cache = CacheHarness(30, FairShare(), block_size=1)
    for start, scope in ((0, "a"), (100, "b"), (200, "c")):
        cache.serve(cache.request(range(start, start + 20), scope))
    hits = [
        cache.serve(cache.request(range(start, start + 10), scope))
        for start, scope in ((0, "a"), (100, "b"), (200, "c"))
    ]
    assert sum(hits) >= 20
    assert min(hits) >= 5


def test_it_is_found_by_name() -> None:
    assert "fair-share" in cache_policies.names()
    assert isinstance(cache_policies.resolve("fair-share"), FairShare)


def test_it_serves_in_an_engine() -> None:
    async def serve() -> tuple[str, str, int]:
        async with Engine(FakeModel(), cache_policy="fair-share") as engine:
            first = await engine.generate("x" * 100, max_tokens=4, temperature=0, cache_scope="a")
            again = await engine.generate("x" * 100, max_tokens=4, temperature=0, cache_scope="a")
        return first.text, again.text, again.usage.cached_tokens

    first, again, cached = asyncio.run(serve())
    assert first == again
    assert cached > 0
