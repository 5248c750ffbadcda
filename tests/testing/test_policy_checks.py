"""The conformance kit passes the shipped policies and catches wrong ones, each by its rule."""

from __future__ import annotations

import random
from asyncio import CancelledError
from collections.abc import Sequence
from threading import Event
from typing import Any

import pytest

from asyncinfer.plugins import cache_policies
from asyncinfer.protocols import CachedBlock
from asyncinfer.testing import RuleError, check_cache_policy

SHIPPED = (
    "arc",
    "conversations",
    "cost-aware",
    "lfu",
    "lru",
    "prefix-lhd",
    "s3-fifo",
    "tail-first",
    "ttl",
)


@pytest.mark.parametrize("name", SHIPPED)
def test_shipped_policies_pass(name: str) -> None:
    check_cache_policy(lambda: cache_policies.resolve(name), examples=40, growth=False)


class Good:
    """Least recently released, plainly; the wrong ones differ from it in one thing."""

    def __init__(self) -> None:
        self.free: dict[int, Any] = {}

    def published(self, block: CachedBlock) -> None:
        pass

    def released(self, block: CachedBlock) -> None:
        self.free[block.block] = None

    def reused(self, block: CachedBlock) -> None:
        self.free.pop(block.block, None)

    def removed(self, block: CachedBlock) -> None:
        self.free.pop(block.block, None)

    def victims(self, count: int) -> Sequence[int]:
        return list(self.free)[:count]


class MissesAMethod:
    published = Good.published
    released = Good.released
    reused = Good.reused
    removed = Good.removed


class KeepsReused(Good):
    """A block in use stays a candidate."""

    def reused(self, block: CachedBlock) -> None:
        pass


class KeepsRemoved(Good):
    """A block that left stays a candidate."""

    def removed(self, block: CachedBlock) -> None:
        pass


class EagerlyFree(Good):
    """A block is a candidate as soon as it is published."""

    def published(self, block: CachedBlock) -> None:
        self.free[block.block] = None


class ReleasedOnce(Good):
    """A block that was used again is never a candidate again."""

    def __init__(self) -> None:
        super().__init__()
        self.used: set[int] = set()

    def reused(self, block: CachedBlock) -> None:
        super().reused(block)
        self.used.add(block.block)

    def released(self, block: CachedBlock) -> None:
        if block.block not in self.used:
            super().released(block)


class ForgetsItsAnswer(Good):
    """What was named once is not named again, though nobody took it."""

    def victims(self, count: int) -> Sequence[int]:
        found = super().victims(count)
        for block in found:
            del self.free[block]
        return found


class OneTooMany(Good):
    def victims(self, count: int) -> Sequence[int]:
        return list(self.free)[: count + 1]


class Twice(Good):
    def victims(self, count: int) -> Sequence[int]:
        found = list(self.free)[:count]
        return [found[0]] * count if found else found


class Generates(Good):
    def victims(self, count: int) -> Any:
        return (block for block in Good.victims(self, count))


class NamesBlocks(Good):
    """Gives metadata instead of numbers."""

    def released(self, block: CachedBlock) -> None:
        self.free[block.block] = block

    def victims(self, count: int) -> Any:
        return list(self.free.values())[:count]


class Writes(Good):
    """Keeps a note of its own in the metadata."""

    def reused(self, block: CachedBlock) -> None:
        super().reused(block)
        block.uses += 1


class NeedsAParent(Good):
    """Gives up the newest, and counts on a parent that may be gone."""

    def __init__(self) -> None:
        super().__init__()
        self.uses: dict[int, int] = {}

    def published(self, block: CachedBlock) -> None:
        self.uses[block.block] = 0

    def removed(self, block: CachedBlock) -> None:
        super().removed(block)
        del self.uses[block.block]
        if block.parent is not None:
            self.uses[block.parent] += 1

    def victims(self, count: int) -> Sequence[int]:
        return list(reversed(self.free))[:count]


class NeedsTime(Good):
    """Divides by the time since the last call, which may be none."""

    last = -1.0

    def reused(self, block: CachedBlock) -> None:
        super().reused(block)
        self.rate = 1.0 / (block.now - self.last)
        self.last = block.now


class Dices(Good):
    """Random from a source that is not its own."""

    def victims(self, count: int) -> Sequence[int]:
        return random.sample([*self.free], min(count, len(self.free)))


class Shares(Good):
    """One set of notes for every object of the class."""

    ranks: dict[int, int] = {}  # noqa: RUF012

    def released(self, block: CachedBlock) -> None:
        super().released(block)
        self.ranks[block.block] = self.ranks.get(block.block, 0) + 1

    def victims(self, count: int) -> Sequence[int]:
        return sorted(self.free, key=lambda block: -self.ranks[block])[:count]


class Hoards(Good):
    """Remembers every prefix for ever."""

    def __init__(self) -> None:
        super().__init__()
        self.keys: set[bytes] = set()

    def removed(self, block: CachedBlock) -> None:
        super().removed(block)
        self.keys.add(block.key)


class BreaksLate(Good):
    """Right until there are a thousand blocks."""

    def victims(self, count: int) -> Sequence[int]:
        return [] if len(self.free) > 1000 else super().victims(count)


class RefusesItsRoom(Good):
    def opened(self, capacity_blocks: int) -> None:
        raise ValueError(f"{capacity_blocks} are too few")


class TakesNoRoom(Good):
    def opened(self) -> None: ...


class WantsRoom(Good):
    """Works only if it is told how many blocks there are, and before anything else."""

    def opened(self, capacity_blocks: int) -> None:
        self.lists: list[list[int]] = [[] for _ in range(capacity_blocks)]

    def published(self, block: CachedBlock) -> None:
        self.lists[block.block].append(block.depth)

    def removed(self, block: CachedBlock) -> None:
        super().removed(block)
        self.lists[block.block].clear()


WRONG: dict[type, str] = {
    RefusesItsRoom: "never raises",
    TakesNoRoom: "methods",
    MissesAMethod: "methods",
    KeepsReused: "evictable",
    KeepsRemoved: "evictable",
    EagerlyFree: "evictable",
    ReleasedOnce: "at least one",
    ForgetsItsAnswer: "at least one",
    OneTooMany: "count",
    Twice: "different",
    Generates: "shape",
    NamesBlocks: "shape",
    Writes: "read only",
    NeedsAParent: "never raises",
    NeedsTime: "never raises",
    Dices: "deterministic",
    Shares: "deterministic",
    Hoards: "memory",
    BreaksLate: "at least one",
}


def test_the_good_one_passes() -> None:
    check_cache_policy(Good, growth=False)


def test_one_that_asks_for_its_capacity_passes() -> None:
    check_cache_policy(WantsRoom, examples=40, growth=False)


@pytest.mark.parametrize("policy", WRONG, ids=lambda policy: policy.__name__)
def test_a_wrong_policy_is_caught_by_its_rule(policy: type) -> None:
    # fault 21, 22
    with pytest.raises(AssertionError) as caught:
        check_cache_policy(policy, examples=40, growth=False)
    assert str(caught.value).startswith(f"{WRONG[policy]}: ")


class Slow(Good):
    """50 ms for each block that is published."""

    def published(self, block: CachedBlock) -> None:
        Event().wait(0.05)


class SlowToChoose(Good):
    def victims(self, count: int) -> Sequence[int]:
        Event().wait(0.05)
        return super().victims(count)


@pytest.mark.parametrize("policy", [Slow, SlowToChoose], ids=lambda policy: policy.__name__)
def test_a_slow_policy_is_caught(policy: type) -> None:
    with pytest.raises(RuleError, match=r"^time: .* took .* ms, as 10 calls in a row"):
        check_cache_policy(policy)


class Hangs(Good):
    def reused(self, block: CachedBlock) -> None:
        stuck_in_here()


class HangsWhenAsked(Good):
    def victims(self, count: int) -> Sequence[int]:
        stuck_in_here()
        return []


def stuck_in_here() -> None:
    Event().wait(120)


@pytest.mark.parametrize("policy", [Hangs, HangsWhenAsked], ids=lambda policy: policy.__name__)
def test_a_policy_that_hangs_is_named_and_shown(policy: type) -> None:
    says = rf"^returns: (reused|victims)\(\) of cache policy {policy.__name__} did not return"
    with pytest.raises(RuleError, match=says) as caught:
        check_cache_policy(policy, patience=1.0)
    assert "in stuck_in_here" in str(caught.value)


@pytest.mark.parametrize("error", [KeyboardInterrupt, SystemExit, CancelledError, GeneratorExit])
def test_no_error_ends_the_kit(error: type[BaseException]) -> None:
    class Raises(Good):
        def released(self, block: CachedBlock) -> None:
            raise error

    with pytest.raises(RuleError, match=rf"^never raises: .*{error.__name__}"):
        check_cache_policy(Raises, examples=20, growth=False)


class Sorts(Good):
    """Ranks every block whenever it is asked."""

    def released(self, block: CachedBlock) -> None:
        self.free[block.block] = block.last_use

    def victims(self, count: int) -> Sequence[int]:
        return sorted(self.free, key=lambda block: self.free[block])[:count]


def test_a_policy_that_sorts_everything_is_caught_by_its_cost() -> None:
    with pytest.raises(AssertionError, match="growth: a block costs"):
        check_cache_policy(Sorts, examples=20)


def test_the_smallest_case_is_shown() -> None:
    with pytest.raises(AssertionError) as caught:
        check_cache_policy(KeepsReused, growth=False)
    lines = str(caught.value).splitlines()
    assert "in a pool of 8 blocks" in lines[1]
    # Cached, again in use and asked for, in one of the two orders that do it: not a move more.
    assert len(lines) == 6
    kinds = [line.split()[1] for line in lines[2:5]]
    assert kinds in (["serve", "open", "ask"], ["ask", "open", "serve"])
