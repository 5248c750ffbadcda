"""A bad eviction policy costs hits, never correctness."""

from __future__ import annotations

import asyncio
import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest

from asyncinfer.cache import LRU, GuardedPolicy
from asyncinfer.errors import PluginError
from asyncinfer.protocols import CachedBlock, EvictionPolicy
from asyncinfer.testing import CacheHarness, check_cache_policy
from asyncinfer.testing.scenarios import simulate_scheduler


class Answering(LRU):
    """An LRU whose answer somebody else gives."""

    def __init__(self, answer: Callable[[Sequence[int], int], Any]) -> None:
        super().__init__()
        self.answer = answer

    def victims(self, count: int) -> Sequence[int]:
        return self.answer(super().victims(count), count)  # type: ignore[no-any-return]


class Endless(Sequence[int]):
    def __len__(self) -> int:
        return 1

    def __getitem__(self, index: Any) -> Any:
        return 10**9


BAD_ANSWERS: dict[str, Callable[[Sequence[int], int], Any]] = {
    "in use": lambda good, count: [0],
    "not its own": lambda good, count: [999],
    "negative": lambda good, count: [-1],
    "twice": lambda good, count: [good[0], good[0]],
    "too many": lambda good, count: [2, 3, 4],
    "none": lambda good, count: [],
    "None": lambda good, count: None,
    "a bool": lambda good, count: [True],
    "a float": lambda good, count: [2.0],
    "text": lambda good, count: ["2"],
    "endless": lambda good, count: Endless(),
    "good, then bad": lambda good, count: [good[0], 0],
}


def evictable(
    policy: EvictionPolicy, faults: list[Exception], clock: Callable[[], float] | None = None
) -> GuardedPolicy:
    """Blocks 0 to 4, of which 2, 3 and 4 are evictable."""
    guard = GuardedPolicy(policy, faults.append, clock)
    for number in range(5):
        block = CachedBlock(number, parent=None, depth=0, tokens=1, scope="", key=bytes([number]))
        guard.published(block)
        if number >= 2:
            guard.released(number, block)
    return guard


@pytest.mark.parametrize("kind", BAD_ANSWERS)
def test_a_bad_answer_is_refused_and_reported_once(kind: str) -> None:
    # fault 21
    faults: list[Exception] = []
    guard = evictable(Answering(BAD_ANSWERS[kind]), faults)
    assert guard.victims(2) == [2, 3]
    assert list(guard.evictable) == [2, 3, 4], "the answer as a whole is checked before its use"
    assert guard.victims(1) == [2]
    assert len(faults) == 1
    assert isinstance(faults[0], PluginError)
    assert "Answering" in str(faults[0])
    assert faults[0].__cause__ is not None


def test_numbers_of_numpy_are_numbers() -> None:
    faults: list[Exception] = []
    policy = Answering(lambda good, count: list(np.array(good)[:count][::-1]))
    found = evictable(policy, faults).victims(2)
    assert found == [3, 2]
    assert {type(block) for block in found} == {int}
    assert not faults
    check_cache_policy(lambda: Answering(lambda good, _: list(np.array(good))), examples=5)


class Raising(LRU):
    """Raises at its n-th call."""

    def __init__(self, at: int) -> None:
        super().__init__()
        self.calls_left = at

    def _count(self) -> None:
        self.calls_left -= 1
        if self.calls_left == 0:
            raise RuntimeError("broken policy")

    def published(self, block: CachedBlock) -> None:
        self._count()

    def released(self, block: CachedBlock) -> None:
        super().released(block)
        self._count()

    def reused(self, block: CachedBlock) -> None:
        self._count()
        super().reused(block)

    def removed(self, block: CachedBlock) -> None:
        self._count()
        super().removed(block)

    def victims(self, count: int) -> Sequence[int]:
        self._count()
        return super().victims(count)


def test_raising_at_any_call_changes_nothing() -> None:
    # fault 22: the n-th call raises, for every n; invariants and tokens are checked throughout.
    healthy = Raising(0)
    simulate_scheduler(8, 14, eviction=healthy)
    calls = -healthy.calls_left
    assert calls > 150
    for n in range(1, calls + 1):
        policy = Raising(n)
        simulate_scheduler(8, 14, eviction=policy)
        assert policy.calls_left == 0, "it was called on after it raised"


def test_a_lying_policy_never_harms_a_token() -> None:
    # fault 21, within whole lives of a scheduler.
    for seed, kind in enumerate(BAD_ANSWERS):
        simulate_scheduler(seed, eviction=Answering(BAD_ANSWERS[kind]))


class Vandal(LRU):
    """Writes to what it may only read."""

    def __init__(self, field: str) -> None:
        super().__init__()
        self.field = field

    def published(self, block: CachedBlock) -> None:
        setattr(block, self.field, 0)


class Remover(LRU):
    """Takes away what it may only read."""

    def published(self, block: CachedBlock) -> None:
        del block.uses


class Burglar(LRU):
    """Writes past what keeps it from writing."""

    def published(self, block: CachedBlock) -> None:
        object.__setattr__(block, "block", -5)
        object.__setattr__(block, "now", None)


@pytest.mark.parametrize("field", [field.name for field in dataclasses.fields(CachedBlock)])
def test_a_policy_that_writes_to_metadata_is_replaced(field: str) -> None:
    faults: list[Exception] = []
    guard = evictable(Vandal(field), faults)
    assert guard.broken
    assert guard.victims(3) == [2, 3, 4]
    assert [block.block for block in guard.evictable.values()] == [2, 3, 4]
    (fault,) = faults
    assert f"cannot assign to field '{field}'" in str(fault)
    assert "(test_guard.py:" in str(fault)


def test_a_policy_that_writes_to_metadata_costs_nothing() -> None:
    for seed, policy in enumerate((Vandal("block"), Vandal("children"), Remover(), Burglar())):
        simulate_scheduler(seed, eviction=policy)


def test_the_successor_keeps_the_order_of_release() -> None:
    faults: list[Exception] = []
    guard = evictable(Answering(lambda good, count: []), faults)
    block = guard.evictable[2]
    guard.reused(2, block)
    guard.released(2, block)
    assert guard.victims(3) == [3, 4, 2]


class Slow(LRU):
    """Takes its time, by a clock of the test's."""

    def __init__(self, seconds: float, method: str) -> None:
        super().__init__()
        self.now, self._seconds, self._slow = 0.0, seconds, method
        self.calls = 0

    def __getattribute__(self, name: str) -> Any:
        if name == object.__getattribute__(self, "_slow"):
            self.now += self._seconds
            self.calls += 1
        return super().__getattribute__(name)


@pytest.mark.parametrize("method", ["published", "released", "reused", "removed", "victims"])
@pytest.mark.parametrize(("seconds", "calls"), [(30.0, 1), (0.012, 101)])
def test_a_slow_policy_is_replaced_and_reported_once(
    method: str, seconds: float, calls: int
) -> None:
    # fault 22
    faults: list[Exception] = []
    policy = Slow(seconds, method)
    guard = GuardedPolicy(policy, faults.append, lambda: policy.now)
    # What else is called owes nothing and pays off little.
    block = CachedBlock(0, parent=None, depth=0, tokens=1, scope="", key=b"")
    for _ in range(4 * calls):
        guard.published(block)
        guard.released(0, block)
        assert guard.victims(1) == [0]
        guard.reused(0, block)
        guard.released(0, block)
        guard.removed(0, block)
    assert guard.broken
    assert policy.calls <= 2 * calls
    assert len(faults) == 1
    assert f"Slow: {method}() is too slow" in str(faults[0])


def test_a_slow_call_now_and_then_is_forgiven() -> None:
    policy = Slow(0.9, "victims")
    guard = evictable(policy, [], lambda: policy.now)
    block = guard.evictable[2]
    for _ in range(5):
        assert guard.victims(1)
        for _ in range(500):
            guard.reused(2, block)
            guard.released(2, block)
    assert not guard.broken
    guard.victims(1)
    guard.victims(1)
    assert guard.broken


class Interrupted(LRU):
    def __init__(self, error: BaseException) -> None:
        super().__init__()
        self.error = error

    def victims(self, count: int) -> Sequence[int]:
        raise self.error


def test_a_ctrl_c_of_the_user_passes() -> None:
    guard = evictable(Interrupted(KeyboardInterrupt()), [])
    with pytest.raises(KeyboardInterrupt):
        guard.victims(1)
    assert not guard.broken


@pytest.mark.parametrize(
    "error", [SystemExit(3), GeneratorExit(), asyncio.CancelledError()], ids=lambda e: repr(e)
)
def test_what_only_a_policy_can_have_raised_is_its_fault(error: BaseException) -> None:
    # fault 22
    faults: list[Exception] = []
    guard = evictable(Interrupted(error), faults)
    assert guard.victims(1) == [2]
    assert guard.broken
    (fault,) = faults
    assert fault.__cause__ is error


class Measured(LRU):
    """Asks for its capacity."""

    def __init__(self, problem: Exception | None = None) -> None:
        super().__init__()
        self.told: list[object] = []
        self.problem = problem

    def opened(self, capacity_blocks: int) -> None:
        self.told.append(capacity_blocks)
        if self.problem is not None:
            raise self.problem

    def published(self, block: CachedBlock) -> None:
        self.told.append(block)


def test_a_policy_is_told_its_capacity_before_any_block() -> None:
    policy = Measured()
    harness = CacheHarness(9, policy, block_size=1)
    harness.serve(harness.request([1, 2, 3]), 0.0)
    assert policy.told[0] == 9
    assert len(policy.told) == 4
    # Those that do not ask are not told.
    assert CacheHarness(9, LRU(), block_size=1).cache.guard.policy


def test_one_that_fails_of_it_is_replaced_before_any_block() -> None:
    faults: list[Exception] = []
    policy = Measured(OSError("too large"))
    harness = CacheHarness(9, policy, block_size=1, on_fault=faults.append)
    harness.serve(harness.request([1, 2, 3]), 0.0)
    (fault,) = faults
    assert "Measured: opened() raised" in str(fault)
    assert "LRU takes over" in str(fault)
    assert policy.told == [9]


def test_a_second_to_get_ready() -> None:
    now = [0.0]

    class Slow(LRU):
        def opened(self, capacity_blocks: int) -> None:
            now[0] += capacity_blocks / 1000

    for blocks, broken in ((900, False), (2_500, True)):
        guard = GuardedPolicy(Slow(), lambda fault: None, lambda: now[0])
        guard.opened(blocks)
        assert guard.broken is broken
