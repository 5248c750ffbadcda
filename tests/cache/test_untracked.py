"""Cached blocks are nothing to the garbage collector, and are freed without it."""

from __future__ import annotations

import gc
import sys
import weakref
from collections.abc import Iterator

import pytest

from asyncinfer.cache import CacheEntry, PrefixCache, prefix_cache
from asyncinfer.cache.chain import pack

pytestmark = pytest.mark.skipif(
    sys.implementation.name != "cpython", reason="another collector, with rules of its own"
)


@pytest.fixture(autouse=True)
def uncollected() -> Iterator[None]:
    gc.collect()
    gc.disable()
    yield
    gc.enable()


def _fill(cache: PrefixCache, blocks: int) -> None:
    tokens = list(range(blocks))
    node: CacheEntry | tuple[str, str] | None = ("", "")
    for block, key in enumerate(cache.keys(tokens)):
        assert node is not None
        node = cache.publish(block, key, pack(tokens[block : block + 1]), node)
    for block in reversed(range(blocks)):
        cache.release(block)


def test_a_cached_block_is_no_tracked_object() -> None:
    cache = PrefixCache(1)
    before = len(gc.get_objects())
    _fill(cache, 1000)
    assert len(gc.get_objects()) - before < 20
    entry = cache.by_block[5]
    assert not gc.is_tracked(entry)
    assert not gc.is_tracked(entry.meta)
    gc.collect()
    assert cache.match(cache.keys([*range(10)]), [*range(10)], ("", ""), 10)[5] is entry


def test_what_is_evicted_is_freed_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    class Watched(CacheEntry):
        __slots__ = ("__weakref__",)

    monkeypatch.setattr(prefix_cache, "CacheEntry", Watched)
    cache = PrefixCache(1)
    _fill(cache, 100)
    alive = [weakref.ref(entry) for entry in cache.by_block.values()]
    cache.evict(30)
    assert sum(each() is not None for each in alive) == 70
    # The first of a long prefix goes before those that name it as their parent.
    del cache
    assert not any(each() is not None for each in alive)


def test_a_long_prefix_is_let_go_without_deep_recursion() -> None:
    cache = PrefixCache(1)
    _fill(cache, 200_000)
    last = cache.by_block[199_999]
    cache.by_key.clear()
    cache.by_block.clear()
    cache.guard.evictable.clear()
    # Each entry is kept by its child alone.
    del last
