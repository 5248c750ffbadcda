"""Publishing, matching, evicting."""

from __future__ import annotations

import pytest

from asyncinfer.cache import BlockHasher, CacheEntry, Namespace, PrefixCache
from asyncinfer.cache.chain import pack

SHARED: Namespace = ("", "")


@pytest.fixture
def cache() -> PrefixCache:
    return PrefixCache(2)


def publish(
    cache: PrefixCache, tokens: list[int], blocks: list[int], namespace: Namespace = SHARED
) -> list[CacheEntry | None]:
    """Publish `tokens` as one request would."""
    entries: list[CacheEntry | None] = []
    node: CacheEntry | Namespace | None = namespace
    for j, key in enumerate(cache.keys(tokens, *namespace)):
        assert node is not None
        node = cache.publish(blocks[j], key, pack(tokens[2 * j : 2 * j + 2]), node)
        entries.append(node)
    return entries


def hits(cache: PrefixCache, tokens: list[int], namespace: Namespace = SHARED) -> list[int]:
    found = cache.match(cache.keys(tokens, *namespace), tokens, namespace, len(tokens))
    return [entry.block for entry in found]


def test_the_longest_published_prefix_is_found(cache: PrefixCache) -> None:
    publish(cache, [1, 2, 3, 4, 5, 6], [7, 8, 9])
    assert hits(cache, [1, 2, 3, 4, 5, 6, 7, 8]) == [7, 8, 9]
    assert hits(cache, [1, 2, 3, 4, 9, 9]) == [7, 8]
    assert hits(cache, [9, 2, 3, 4]) == []


def test_the_limit_bounds_a_hit(cache: PrefixCache) -> None:
    tokens = [1, 2, 3, 4]
    publish(cache, tokens, [7, 8])
    assert [e.block for e in cache.match(cache.keys(tokens), tokens, SHARED, 1)] == [7]


def test_scopes_and_adapters_share_nothing(cache: PrefixCache) -> None:
    # fault 51
    publish(cache, [1, 2], [7], ("namespace", ""))
    publish(cache, [1, 2], [8], ("", "namespace"))
    assert hits(cache, [1, 2]) == []
    assert hits(cache, [1, 2], ("namespace", "")) == [7]
    assert hits(cache, [1, 2], ("", "namespace")) == [8]


def test_an_equal_prefix_is_published_once(cache: PrefixCache) -> None:
    first = publish(cache, [1, 2, 3, 4], [7, 8])
    again = publish(cache, [1, 2, 3, 4], [5, 6])
    assert first == again
    assert hits(cache, [1, 2, 3, 4]) == [7, 8]


class Colliding(BlockHasher):
    def digest(self, data: bytes) -> bytes:
        return b"same"


def test_a_colliding_key_is_neither_hit_nor_replaced() -> None:
    # fault 51
    cache = PrefixCache(2, hasher=Colliding(2, b""))
    publish(cache, [1, 2], [7])
    assert hits(cache, [3, 4]) == []
    assert publish(cache, [3, 4], [8]) == [None]
    for other in (("tenant", ""), ("", "adapter")):
        assert hits(cache, [1, 2], other) == []
        assert publish(cache, [1, 2], [8], other) == [None]
    assert hits(cache, [1, 2]) == [7]


def test_eviction_takes_what_was_released_first(cache: PrefixCache) -> None:
    publish(cache, [1, 2, 3, 4], [7, 8])
    assert cache.evictable == 0
    for block in (8, 7):
        assert cache.release(block)
    assert cache.evictable == 2
    assert cache.evict(1) == [8]
    assert hits(cache, [1, 2, 3, 4]) == [7]
    assert not cache.release(8), "an evicted block is not the cache's any more"


def test_a_reused_block_is_not_evictable(cache: PrefixCache) -> None:
    entry = publish(cache, [1, 2], [7])[0]
    assert entry is not None
    cache.release(7)
    cache.reuse(entry)
    assert cache.evictable == 0
    assert entry.meta.uses == 1


def test_a_child_outlives_its_parent_and_is_found_again(cache: PrefixCache) -> None:
    publish(cache, [1, 2, 3, 4], [7, 8])
    for block in (7, 8):
        cache.release(block)
    assert cache.evict(1) == [7]
    assert hits(cache, [1, 2, 3, 4]) == []
    parent, child = publish(cache, [1, 2, 3, 4], [5, 6])
    assert parent is not None
    assert child is not None
    assert hits(cache, [1, 2, 3, 4]) == [5, 8]
    assert child.parent is parent
    assert (parent.meta.children, child.meta.parent) == (1, 5)


def test_metadata_tells_a_policy_what_it_needs(cache: PrefixCache) -> None:
    cache.now = 5.0
    parent, child = publish(cache, [1, 2, 3, 4], [7, 8], ("namespace", ""))
    assert parent is not None
    assert child is not None
    assert (parent.meta.depth, child.meta.depth) == (0, 1)
    assert (parent.meta.parent, child.meta.parent) == (None, 7)
    assert (parent.meta.children, child.meta.children) == (1, 0)
    assert (child.meta.scope, child.meta.tokens, child.meta.now) == ("namespace", 2, 5.0)
    assert parent.meta.created < child.meta.created == child.meta.last_use
    cache.now = 6.0
    cache.release(8)
    assert child.meta.last_use > child.meta.created
    assert child.meta.now == 6.0
    cache.evict(1)
    assert parent.meta.children == 0


def test_the_default_secret_is_random() -> None:
    assert PrefixCache(2).keys([1, 2]) != PrefixCache(2).keys([1, 2])
