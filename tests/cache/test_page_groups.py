"""Any number of KV groups, of any kind: a hit ends where every one of them can serve it."""

from __future__ import annotations

from asyncinfer.cache import (
    BlockManager,
    FullPages,
    KVGroupSpec,
    PrefixCache,
    WindowPages,
)
from asyncinfer.params import SamplingParams
from asyncinfer.scheduler import Sequence

GREEDY = SamplingParams(temperature=0.0)
TOKENS = list(range(1, 17))


class States(WindowPages):
    """A kind that is not there yet. A token needs the state after the block before its own, and
    only the state after every other block is kept for hits."""

    def __init__(self, num_pages: int, block_size: int) -> None:
        super().__init__(num_pages, 2, block_size)
        self._published = 0

    def keep(self, block: int, page: int, *, again: bool) -> None:
        self._published += 1
        if self._published % 2 == 0:
            super().keep(block, page, again=again)


def computed(blocks: BlockManager, tokens: list[int]) -> Sequence:
    """A request whose tokens are all committed, in steps of a block."""
    assert blocks.cache is not None
    keys = blocks.cache.keys(tokens)
    r = Sequence(1, tokens, GREEDY, max_total=99, seed=0, arrival=0.0, keys=keys)
    blocks.open(r, blocks.match(r, len(tokens) - 1))
    while r.capacity < len(tokens):
        blocks.grow(r, 1)
        blocks.publish(r, r.capacity)
        blocks.trim(r, r.capacity)
    return r


def hit(blocks: BlockManager, limit: int) -> int:
    """Leading blocks of TOKENS that are found."""
    assert blocks.cache is not None
    keys = blocks.cache.keys(TOKENS)
    r = Sequence(2, TOKENS, GREEDY, max_total=99, seed=0, arrival=0.0, keys=keys)
    return len(blocks.match(r, limit))


def test_every_group_has_a_table_of_its_own() -> None:
    specs = [KVGroupSpec(9), KVGroupSpec(9, window=3), KVGroupSpec(9, window=7)]
    blocks = BlockManager.of(specs, 2, PrefixCache(2))
    r = computed(blocks, TOKENS)
    assert [len(table.pages) for table in r.tables] == [8, 8, 8]
    # A token at position 16 sees the two before it, or the six before it.
    assert [table.first_live_page for table in r.tables] == [0, 7, 5]
    assert [table.held for table in r.tables] == [8, 1, 3]
    assert blocks.available == 1
    assert blocks.wanted(20, [], 0) == [10, 3, 5]
    assert blocks.wanted(20, [], 16) == [2, 2, 2]
    found = blocks.match(r, 16)
    assert blocks.wanted(20, found) == [2, 2, 2]
    blocks.close(r)
    assert blocks.wanted(20, found) == [10, 3, 5], "pages that nobody has are available"
    assert [group.available for group in blocks.groups] == [9, 9, 9]


def test_what_one_group_shortens_may_be_too_short_for_another() -> None:
    cache = PrefixCache(2)
    narrow, wide = WindowPages(9, 3, 2), WindowPages(9, 7, 2)
    blocks = BlockManager(FullPages(9, cache), [narrow, wide], 2, cache)
    table = computed(blocks, TOKENS).tables[0].pages
    assert hit(blocks, 16) == 8
    narrow.drop(table[7])
    assert hit(blocks, 16) == 7
    # The wide window cannot serve 7, 6 and 5 blocks now, and the narrow one not 4.
    wide.drop(table[4])
    narrow.drop(table[3])
    assert hit(blocks, 16) == 3
    narrow.drop(table[2])
    wide.drop(table[1])
    assert hit(blocks, 16) == 1
    wide.drop(table[0])
    assert hit(blocks, 16) == 0


def test_a_kind_that_is_not_there_yet() -> None:
    cache = PrefixCache(2)
    blocks = BlockManager(FullPages(20, cache), [States(20, 2)], 2, cache)
    first = computed(blocks, TOKENS)
    assert first.tables[1].held == 1
    assert [hit(blocks, limit) for limit in (16, 15, 12, 11, 5, 3)] == [8, 6, 6, 4, 2, 0]
    second = computed(blocks, [*TOKENS[:10], 90, 91, 92])
    assert second.tables[0].pages[:4] == first.tables[0].pages[:4]
    assert second.tables[0].pages[4] not in first.tables[0].pages
    blocks.close(first)
    blocks.close(second)
    assert blocks.available == 20


def test_growing_together_is_growing_one_after_the_other() -> None:
    """By a block each, where that takes cached blocks too."""
    outcomes = []
    for together in (True, False):
        cache = PrefixCache(2)
        blocks = BlockManager.of([KVGroupSpec(6), KVGroupSpec(9, window=3)], 2, cache)
        blocks.close(computed(blocks, TOKENS[:8]))
        assert (cache.evictable, blocks.available) == (4, 6)
        pair = [Sequence(n, [n], GREEDY, max_total=99, seed=0, arrival=0.0) for n in (3, 4)]
        for r in pair:
            blocks.open(r, [])
        for _ in range(2):
            if together:
                blocks.grow_each(pair)
            else:
                for r in pair:
                    blocks.grow(r, 1)
        # Which of them has which page depends on when cached ones are given up.
        tables = [sorted(pair[0].tables[g].pages + pair[1].tables[g].pages) for g in (0, 1)]
        free = [sorted(group.pool.free) for group in blocks.groups]
        outcomes.append((tables, [r.capacity for r in pair], free, sorted(cache.by_block)))
    assert outcomes[0] == outcomes[1]
    assert outcomes[0][1] == [4, 4]
    assert len(outcomes[0][3]) == 2, "two of the cached blocks had to go"
