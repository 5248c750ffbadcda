"""What open conversations have computed is kept before all else, within a bound."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from asyncinfer.cache.policies.conversations import ByConversation
from asyncinfer.cache.policies.lru import LRU
from asyncinfer.protocols import CachedBlock, EvictionPolicy
from asyncinfer.testing import CacheHarness, check_cache_policy
from asyncinfer.testing.invariants import check_conversations


class Told(LRU):
    """Remembers what it was told of conversations."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks: dict[int, CachedBlock] = {}
        self.changes: list[tuple[int, str | None]] = []

    def published(self, block: CachedBlock) -> None:
        self.blocks[block.block] = block

    def conversation_changed(self, block: CachedBlock) -> None:
        self.changes.append((block.depth, block.conversation))


@pytest.fixture
def harness() -> Iterator[CacheHarness]:
    """Sixteen blocks of one token, of which eight may be pinned."""
    made = CacheHarness(16, LRU(), block_size=1)
    yield made
    check_conversations(made.cache)
    assert made.manager.available == 16


def serve(harness: CacheHarness, tokens: range, of: object = None, now: float = 0.0) -> int:
    """Hits of a request."""
    hits = harness.serve(harness.request(tokens, conversation=of), now)
    check_conversations(harness.cache)
    return hits


def strangers(harness: CacheHarness, first: int, count: int = 4) -> None:
    """Enough to fill the cache several times."""
    for number in range(first, first + 10 * count, count):
        serve(harness, range(number, number + count))


def test_pinned_blocks_outlive_the_rest(harness: CacheHarness) -> None:
    serve(harness, range(6), "talk")
    serve(harness, range(10, 14))
    strangers(harness, 1000)
    assert serve(harness, range(10, 14)) == 0
    assert serve(harness, range(6), "talk") == 6
    harness.converse("talk", "over")
    strangers(harness, 2000)
    assert serve(harness, range(6)) == 0


def test_pins_are_a_share_of_the_blocks(harness: CacheHarness) -> None:
    """The beginnings of the conversations that were used last."""
    serve(harness, range(5), "old")
    serve(harness, range(10, 15), "new")
    assert harness.cache.conversations.pinned_blocks == 5
    serve(harness, range(20, 32), "long")
    assert harness.cache.conversations.pinned_blocks == 8
    strangers(harness, 1000)
    assert serve(harness, range(20, 32), "long") == 8
    assert serve(harness, range(5)) == 0
    assert serve(harness, range(10, 15)) == 0


def test_one_that_waits_for_a_tool_is_the_last_to_lose_its_pins(harness: CacheHarness) -> None:
    serve(harness, range(4), "tool")
    harness.converse("tool", "waiting")
    serve(harness, range(10, 14), "user")
    serve(harness, range(20, 24), "third")
    strangers(harness, 1000)
    assert serve(harness, range(4), "tool") == 4
    assert serve(harness, range(10, 14), "user") == 0


def test_pins_give_way_to_requests(harness: CacheHarness) -> None:
    """No request waits for a pin."""
    serve(harness, range(8), "talk")
    assert serve(harness, range(100, 116)) == 0
    assert harness.cache.conversations.pinned_blocks == 0
    assert serve(harness, range(8), "talk") == 0
    assert harness.cache.conversations.pinned_blocks == 8


def test_what_is_taken_back_is_let_go(harness: CacheHarness) -> None:
    serve(harness, range(8), "talk")
    serve(harness, range(4), "talk")
    assert harness.cache.conversations.pinned_blocks == 8, "a shorter prompt takes nothing back"
    serve(harness, range(0, 16, 2), "talk")
    assert harness.cache.conversations.pinned_blocks == 8
    strangers(harness, 1000)
    assert serve(harness, range(8)) == 1


def test_after_its_time_a_conversation_is_over_until_it_goes_on() -> None:
    harness = CacheHarness(16, LRU(), block_size=1)
    request = harness.request(range(4), conversation="talk")
    assert request.conversation is not None
    request.conversation.ttl = 5.0
    harness.serve(request, 1.0)
    talks = harness.cache.conversations
    talks.expire(5.9)
    assert talks.pinned_blocks == 4
    talks.expire(6.0)
    assert talks.pinned_blocks == 0
    assert not talks.open
    serve(harness, range(6), "talk", 7.0)
    assert talks.pinned_blocks == 6
    check_conversations(harness.cache)


def test_the_earliest_end_of_a_conversation_is_looked_for() -> None:
    harness = CacheHarness(16, LRU(), block_size=1)
    talks = harness.cache.conversations
    for name, ttl in (("short", 5.0), ("long", 50.0)):
        request = harness.request(range(4), conversation=name)
        assert request.conversation is not None
        request.conversation.ttl = ttl
        harness.serve(request, 1.0)
    assert talks.due == 6.0
    talks.expire(6.0)
    assert talks.due == 51.0


def test_a_fork_holds_what_its_origin_held(harness: CacheHarness) -> None:
    request = harness.request(range(6), conversation="one")
    made = harness.request(range(6), conversation="two")
    harness.serve(request)
    assert request.conversation is not None
    assert made.conversation is not None
    harness.cache.conversations.fork(request.conversation, made.conversation, 0.0)
    harness.converse("one", "over")
    strangers(harness, 1000)
    assert serve(harness, range(6), "two") == 6
    harness.converse("two", "over")
    assert harness.cache.conversations.pinned_blocks == 0


def test_an_evicted_beginning_is_not_pinned(harness: CacheHarness) -> None:
    """A conversation that lost its pins, and then its blocks, may be forked."""
    request = harness.request(range(6), conversation="one")
    harness.serve(request)
    serve(harness, range(100, 116))
    made = harness.request(range(6), conversation="two")
    assert request.conversation is not None
    assert made.conversation is not None
    harness.cache.conversations.fork(request.conversation, made.conversation, 0.0)
    check_conversations(harness.cache)
    assert harness.cache.conversations.pinned_blocks == 0


def test_policies_are_told() -> None:
    policy = Told()
    harness = CacheHarness(16, policy, block_size=1, pinned_share=0.0)
    serve(harness, range(2))
    assert {block.conversation for block in policy.blocks.values()} == {None}
    serve(harness, range(3), "one")
    assert sorted(b.conversations for b in policy.blocks.values()) == [1, 1, 1]
    harness.converse("one", "waiting")
    assert policy.changes == [(2, "waiting"), (1, "waiting"), (0, "waiting")]
    serve(harness, range(1), "two")
    assert {b.depth: b.conversation for b in policy.blocks.values()} == dict.fromkeys(
        range(3), "waiting"
    )
    harness.converse("one", "over")
    states = {b.depth: (b.conversation, b.conversations) for b in policy.blocks.values()}
    assert states == {0: ("live", 2), 1: ("over", 1), 2: ("over", 1)}


def victims(policy: EvictionPolicy) -> list[int]:
    """First tokens of three conversations and a stranger, in the order in which they go."""
    harness = CacheHarness(16, policy, block_size=1, pinned_share=0.0)
    for number, name in enumerate(("waits", "over", None, "live")):
        serve(harness, range(10 * number, 10 * number + 2), name)
    harness.converse("waits", "waiting")
    harness.converse("over", "over")
    entries = harness.cache.by_block
    return [entries[block].tokens[0] for block in harness.cache.guard.victims(8)]


def test_what_is_over_goes_first() -> None:
    assert victims(ByConversation()) == [11, 10, 21, 20, 31, 30, 1, 0]
    assert victims(LRU()) == [1, 0, 11, 10, 21, 20, 31, 30]


class Forgets(ByConversation):
    """Broken: a block that is told of once more is offered after it was reused."""

    def reused(self, block: CachedBlock) -> None:
        if block.conversation is None:
            super().reused(block)


def test_the_kit_has_conversations_in_its_lives() -> None:
    with pytest.raises(AssertionError, match=r"^evictable: (.|\n)*of conversation"):
        check_cache_policy(Forgets, growth=False)
