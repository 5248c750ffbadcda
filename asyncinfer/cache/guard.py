"""`GuardedPolicy`: lets an eviction policy cost hits, never correctness."""

from __future__ import annotations

from collections.abc import Callable
from itertools import islice

from asyncinfer.cache.policies.lru import LRU
from asyncinfer.errors import PluginError
from asyncinfer.protocols.eviction import CachedBlock, EvictionPolicy

__all__ = ["GuardedPolicy"]


class GuardedPolicy:
    """Owns the set of evictable blocks, passes events on to a policy, and checks its answers.

    A policy that raises, or whose answer is not one to `count` different evictable blocks, is
    replaced for good by an `LRU` rebuilt from the set; `on_fault` is told once. The answer is
    checked as a whole before any of it is used, so a bad one changes nothing.
    """

    def __init__(
        self, policy: EvictionPolicy, on_fault: Callable[[Exception], None] | None = None
    ) -> None:
        self.policy = policy
        self.broken = False
        self._on_fault = on_fault
        #: In the order of release, which is all an `LRU` needs to take over.
        self.evictable: dict[int, CachedBlock] = {}

    def published(self, block: CachedBlock) -> None:
        try:
            self.policy.published(block)
        except Exception as error:
            self._replace("published() raised", error)

    def released(self, number: int, block: CachedBlock) -> None:
        self.evictable[number] = block
        # A policy may have written to the metadata; the number is the engine's own.
        block.block = number
        try:
            self.policy.released(block)
        except Exception as error:
            self._replace("released() raised", error)

    def reused(self, number: int, block: CachedBlock) -> None:
        self.evictable.pop(number, None)
        try:
            self.policy.reused(block)
        except Exception as error:
            self._replace("reused() raised", error)

    def removed(self, number: int, block: CachedBlock) -> None:
        self.evictable.pop(number, None)
        try:
            self.policy.removed(block)
        except Exception as error:
            self._replace("removed() raised", error)

    def victims(self, count: int) -> list[int]:
        """One to `count` different evictable blocks; there must be one."""
        assert self.evictable
        assert count > 0
        try:
            return self._checked(count)
        except Exception as error:
            self._replace("victims() gave no usable answer", error)
            return self._checked(count)

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
