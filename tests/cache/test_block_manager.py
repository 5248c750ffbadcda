"""Tables, references, copy-on-write."""

from __future__ import annotations

from asyncinfer.cache import BlockManager, KVGroupSpec, PagePool, PrefixCache
from asyncinfer.params import SamplingParams
from asyncinfer.scheduler import Sequence

GREEDY = SamplingParams(temperature=0.0)


def sequence(id: int, tokens: list[int], cache: PrefixCache | None = None) -> Sequence:
    keys = None if cache is None else cache.keys(tokens)
    return Sequence(id, tokens, GREEDY, max_total=99, seed=0, arrival=0.0, keys=keys)


def test_the_pool_counts_references() -> None:
    pool = PagePool(4)
    taken = pool.take(3)
    assert taken == [0, 1, 2]
    assert pool.refs == [1, 1, 1, 0]
    pool.refs[1] = 0
    pool.put(1)
    assert pool.take(2) == [1, 3]
    assert pool.take(0) == []


def test_a_table_grows_and_is_given_back_tail_first() -> None:
    blocks = BlockManager.of([KVGroupSpec(4)], 2, None)
    r = sequence(1, [1, 2, 3])
    blocks.open(r, [])
    blocks.grow(r, 2)
    assert (r.tables[0].pages, r.capacity, blocks.available) == ([0, 1], 4, 2)
    blocks.close(r)
    assert (r.tables, r.capacity, blocks.available) == ([], 0, 4)
    assert blocks.groups[0].pool.free[-2:] == [1, 0]


def test_committed_blocks_are_found_and_shared() -> None:
    cache = PrefixCache(2)
    blocks = BlockManager.of([KVGroupSpec(6)], 2, cache)
    a = sequence(1, [1, 2, 3, 4, 5], cache)
    blocks.open(a, [])
    blocks.grow(a, 3)
    blocks.publish(a, 3)
    b = sequence(2, [1, 2, 3, 4, 9], cache)
    assert [e.block for e in blocks.match(b, 4)] == [a.tables[0].pages[0]], "only what is committed"
    blocks.publish(a, 5)
    entries = blocks.match(b, 4)
    blocks.open(b, entries)
    assert b.tables[0].pages == a.tables[0].pages[:2]
    assert b.capacity == 4
    assert [blocks.groups[0].pool.refs[block] for block in a.tables[0].pages] == [2, 2, 1]
    blocks.close(a)
    assert cache.evictable == 0
    blocks.close(b)
    assert (cache.evictable, blocks.available) == (2, 6)


def test_cached_blocks_are_evicted_when_the_free_list_is_empty() -> None:
    cache = PrefixCache(2)
    blocks = BlockManager.of([KVGroupSpec(3)], 2, cache)
    a = sequence(1, [1, 2, 3, 4], cache)
    blocks.open(a, [])
    blocks.grow(a, 2)
    blocks.publish(a, 4)
    blocks.close(a)
    b = sequence(2, [7, 7, 7, 7], cache)
    blocks.open(b, [])
    blocks.grow(b, 2)
    assert blocks.match(a, 4)[0].block == 0, "the tail of the prefix went first"
    assert len(blocks.match(a, 4)) == 1
    blocks.grow(b, 1)
    assert blocks.match(a, 4) == []


def test_an_answer_extends_the_chain() -> None:
    cache = PrefixCache(2)
    blocks = BlockManager.of([KVGroupSpec(4)], 2, cache)
    a = sequence(1, [1], cache)
    blocks.open(a, [])
    blocks.grow(a, 2)
    a.tokens += [2, 3, 4]
    blocks.publish(a, 4)
    assert a.keys == cache.keys([1, 2, 3, 4])
    assert len(blocks.match(sequence(2, [1, 2, 3, 4, 5], cache), 4)) == 2


def test_a_fork_shares_full_blocks_and_copies_the_tail() -> None:
    blocks = BlockManager.of([KVGroupSpec(6)], 2, None)
    a = sequence(1, [1, 2, 3, 4])
    blocks.open(a, [])
    blocks.grow(a, 2)
    b = sequence(2, [1, 2, 3, 4])
    copies = blocks.fork(b, a, 3)
    assert b.tables[0].pages == [0, 2]
    assert copies == [(1, 2)]
    assert blocks.groups[0].pool.refs[:3] == [2, 2, 1], "the source of the copy is pinned"
    blocks.groups[0].release(1)
    assert blocks.groups[0].pool.refs[:3] == [2, 1, 1]
    c = sequence(3, [1, 2, 3])
    assert blocks.fork(c, a, 2) == [], "no partly filled block, no copy"
    assert c.tables[0].pages == [0]
