"""Window pages: who has them, who keeps them, which go first."""

from __future__ import annotations

import pytest

from asyncinfer.cache import BlockManager, FullPages, PrefixCache, WindowPages
from asyncinfer.params import SamplingParams
from asyncinfer.scheduler import Sequence

GREEDY = SamplingParams(temperature=0.0)
TOKENS = list(range(1, 13))


def manager(pages: int = 8, window: int = 5, blocks: int = 32) -> tuple[BlockManager, WindowPages]:
    cache, windows = PrefixCache(2), WindowPages(pages, window, 2)
    return BlockManager(FullPages(blocks, cache), [windows], 2, cache), windows


def sequence(id: int, blocks: BlockManager, tokens: list[int] = TOKENS) -> Sequence:
    assert blocks.cache is not None
    return Sequence(
        id, tokens, GREEDY, max_total=99, seed=0, arrival=0.0, keys=blocks.cache.keys(tokens)
    )


def compute(blocks: BlockManager, r: Sequence) -> int:
    """All of the request in steps of a block; gives the most pages it had."""
    blocks.open(r, blocks.match(r, len(r.tokens) - 1))
    most = 0
    for done in range(r.capacity, len(r.tokens), 2):
        blocks.grow(r, 1)
        most = max(most, r.tables[1].held)
        blocks.publish(r, done + 2)
        blocks.trim(r, done + 2)
    return most


@pytest.mark.parametrize(
    ("window", "reach", "firsts"),
    [
        (1, 0, [0, 0, 1, 1, 2, 2]),
        (2, 1, [0, 0, 0, 1, 1, 2]),
        (3, 1, [0, 0, 0, 0, 1, 1]),
        (4, 2, [0, 0, 0, 0, 0, 1]),
    ],
)
def test_what_a_token_sees(window: int, reach: int, firsts: list[int]) -> None:
    pool = WindowPages(8, window, 2)
    assert pool.reach == reach
    assert [pool.first(position) for position in range(6)] == firsts


def test_a_request_holds_its_window_and_a_chunk() -> None:
    blocks, windows = manager(pages=4)
    r = sequence(1, blocks)
    assert compute(blocks, r) == 3
    assert (r.capacity, r.tables[1].first_live_page, windows.available) == (12, 4, 2)
    assert r.tables[1].pages[:4] == [-1] * 4
    blocks.close(r)
    assert windows.available == 4
    assert not any(windows.pool.refs)


def test_pages_that_nobody_sees_stay_for_hits_until_their_room_is_needed() -> None:
    blocks, windows = manager(pages=8)
    a = sequence(1, blocks)
    compute(blocks, a)
    assert sorted(windows.kept) == sorted(a.tables[0].pages)
    assert (len(windows.passed), len(windows.unused)) == (4, 0)
    b = sequence(2, blocks, [*TOKENS[:6], 90, 91])
    entries = blocks.match(b, 7)
    assert [entry.block for entry in entries] == a.tables[0].pages[:3]
    blocks.open(b, entries)
    assert (b.tables[1].first_live_page, b.capacity) == (1, 6)
    assert b.tables[1].pages == [
        -1,
        windows.kept[a.tables[0].pages[1]],
        windows.kept[a.tables[0].pages[2]],
    ]
    assert [windows.pool.refs[page] for page in b.tables[1].pages[1:]] == [1, 1]
    # Four pages more: two are free, and the two that were given back first go.
    blocks.grow(b, 4)
    assert a.tables[0].pages[0] not in windows.kept
    assert a.tables[0].pages[3] not in windows.kept
    assert windows.available == 0


def test_pages_that_were_asked_for_again_outlive_those_that_were_passed() -> None:
    blocks, windows = manager(pages=8)
    a = sequence(1, blocks)
    compute(blocks, a)
    table = list(a.tables[0].pages)
    blocks.close(a)
    b = sequence(2, blocks, [*TOKENS[:6], 90, 91])
    blocks.open(b, blocks.match(b, 7))
    blocks.grow(b, 2)
    # It leaves the pages behind that it was given.
    blocks.trim(b, 10)
    assert {windows.keeper[page] for page in windows.passed} == {table[0], table[3]}
    blocks.grow(b, 2)
    assert set(windows.kept) == {table[1], table[2], table[4], table[5]}


def test_a_hit_ends_where_its_window_is_whole() -> None:
    blocks, windows = manager(pages=8)
    a = sequence(1, blocks)
    compute(blocks, a)
    blocks.close(a)
    table = [entry.block for entry in blocks.match(sequence(2, blocks), 12)]
    assert len(table) == 6
    windows.drop(table[4])
    assert len(blocks.match(sequence(2, blocks), 12)) == 4
    windows.drop(table[2])
    # Of the fourth block's two one is gone; the first two blocks have all there is before them.
    assert len(blocks.match(sequence(2, blocks), 12)) == 2
    windows.drop(table[1])
    assert len(blocks.match(sequence(2, blocks), 12)) == 1
    windows.drop(table[0])
    assert blocks.match(sequence(2, blocks), 12) == []


def test_a_page_computed_again_is_kept_for_the_block_that_lost_its_own() -> None:
    blocks, windows = manager(pages=8)
    a = sequence(1, blocks)
    compute(blocks, a)
    table = list(a.tables[0].pages)
    blocks.close(a)
    for block in table:
        windows.drop(block)
    b = sequence(2, blocks)
    compute(blocks, b)
    assert not set(b.tables[0].pages) & set(table), "it had to compute everything again"
    assert sorted(windows.kept) == sorted(table)
    assert not windows.passed, "all of it was asked for again"
    blocks.close(b)
    assert len(blocks.match(sequence(3, blocks), 12)) == 6


def test_a_block_that_goes_takes_its_page_along() -> None:
    blocks, windows = manager(pages=8, blocks=6)
    a = sequence(1, blocks)
    compute(blocks, a)
    blocks.close(a)
    assert (len(windows.kept), len(windows.pool.free)) == (6, 2)
    b = sequence(2, blocks, [7, 7, 7])
    blocks.open(b, [])
    blocks.grow(b, 2)
    assert (len(windows.kept), len(windows.pool.free)) == (4, 2)


def test_answers_of_one_prompt_share_what_both_see() -> None:
    blocks, windows = manager(pages=8, window=6)
    a = sequence(1, blocks, TOKENS[:10])
    compute(blocks, a)
    b = sequence(2, blocks, TOKENS[:10])
    assert blocks.can_fork(a, 9)
    copies = blocks.fork(b, a, 9)
    assert copies == [
        (mine.pages[4], own.pages[4]) for mine, own in zip(a.tables, b.tables, strict=True)
    ]
    source, _ = copies[1]
    assert b.tables[1].pages[:4] == [-1, -1, a.tables[1].pages[2], a.tables[1].pages[3]]
    assert windows.pool.refs[source] == 2
    blocks.close(a)
    assert windows.pool.refs[source] == 1
    windows.release(source)
    assert windows.pool.refs[source] == 0
    far = sequence(3, blocks, TOKENS[:10])
    blocks.close(b)
    compute(blocks, far)
    blocks.grow(far, 4)
    blocks.trim(far, 17)
    assert not blocks.can_fork(far, 9)
