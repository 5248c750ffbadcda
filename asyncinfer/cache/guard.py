"""`GuardedPolicy`: lets an eviction policy cost hits, never correctness."""

from __future__ import annotations

from collections.abc import Callable
from itertools import islice
from typing import Final

from asyncinfer.cache.policies.lru import LRU
from asyncinfer.errors import PluginError
from asyncinfer.protocols.eviction import CachedBlock, EvictionPolicy

__all__ = ["GuardedPolicy"]

#: Seconds that a call may take, and each victim; and that a policy may owe in all.
ALLOWED: Final = 0.001
TOO_LATE: Final = 1.0


class GuardedPolicy:
    """Owns the set of evictable blocks, passes events on to a policy, and checks its answers.

    A policy that raises, takes too long, or whose answer is not one to `count` different
    evictable blocks, is replaced for good by an `LRU` rebuilt from the set; `on_fault` is told
    once. The answer is checked as a whole before any of it is used, so a bad one changes nothing.

    Each call, and each victim, may take `ALLOWED` seconds; what it takes beyond is a debt that
    later calls pay off with what they leave. A policy that owes `TOO_LATE` seconds is too slow:
    one call of a second, or a hundred of eleven milliseconds, but not a busy machine now and then.

    Args:
        policy: not trusted.
        on_fault: told of the fault, a `PluginError`.
        clock: monotonic seconds; without one, nothing is too slow.
    """

    def __init__(
        self,
        policy: EvictionPolicy,
        on_fault: Callable[[Exception], None] | None = None,
        clock: Callable[[], float] | None = None,
    ) -> None:
        self.policy = policy
        self.broken = False
        self._on_fault = on_fault
        self._clock = clock or _stopped
        self._debt = 0.0
        #: In the order of release, which is all an `LRU` needs to take over.
        self.evictable: dict[int, CachedBlock] = {}

    def published(self, block: CachedBlock) -> None:
        began = self._clock()
        try:
            self.policy.published(block)
        except Exception as error:
            self._replace("published() raised", error)
        self._charge("published()", began)

    def released(self, number: int, block: CachedBlock) -> None:
        self.evictable[number] = block
        # A policy may have written to the metadata; the number is the engine's own.
        block.block = number
        began = self._clock()
        try:
            self.policy.released(block)
        except Exception as error:
            self._replace("released() raised", error)
        self._charge("released()", began)

    def reused(self, number: int, block: CachedBlock) -> None:
        self.evictable.pop(number, None)
        began = self._clock()
        try:
            self.policy.reused(block)
        except Exception as error:
            self._replace("reused() raised", error)
        self._charge("reused()", began)

    def removed(self, number: int, block: CachedBlock) -> None:
        self.evictable.pop(number, None)
        began = self._clock()
        try:
            self.policy.removed(block)
        except Exception as error:
            self._replace("removed() raised", error)
        self._charge("removed()", began)

    def victims(self, count: int) -> list[int]:
        """One to `count` different evictable blocks; there must be one."""
        assert self.evictable
        assert count > 0
        began = self._clock()
        try:
            victims = self._checked(count)
        except Exception as error:
            self._replace("victims() gave no usable answer", error)
            victims = self._checked(count)
        self._charge("victims()", began, count)
        return victims

    def _checked(self, count: int) -> list[int]:
        answer = self.policy.victims(count)
        if not 1 <= len(answer) <= count:
            raise ValueError(f"{len(answer)} victims, asked for 1 to {count}")
        victims = list(islice(answer, count))
        for block in victims:
            if isinstance(block, bool) or not isinstance(block, int):
                raise TypeError(f"victim {block!r} is not a block number")
            if block not in self.evictable:
                raise ValueError(f"victim {block} is not an evictable block")
        if len(set(victims)) != len(answer):
            raise ValueError("the same victim twice")
        return victims

    def _charge(self, what: str, began: float, victims: int = 0) -> None:
        debt = self._debt + self._clock() - began - ALLOWED * (1 + victims)
        self._debt = debt if debt > 0.0 else 0.0
        if debt > TOO_LATE and not self.broken:
            late = TimeoutError(f"{debt:.1f} s more than {ALLOWED * 1e3:g} ms a call and victim")
            self._replace(f"{what} took too long", late)

    def _replace(self, what: str, error: Exception) -> None:
        assert not self.broken, "the LRU that replaced a policy failed"
        culprit, self.broken = type(self.policy).__qualname__, True
        self.policy = LRU()
        for number, block in self.evictable.items():
            block.block = number
            self.policy.released(block)
        if self._on_fault is not None:
            fault = PluginError(f"cache policy {culprit}: {what}: {error!r}; LRU takes over")
            fault.__cause__ = error
            self._on_fault(fault)


def _stopped() -> float:
    return 0.0
