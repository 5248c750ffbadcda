"""`GuardedPolicy`: lets an eviction policy cost hits, never correctness."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import suppress
from itertools import islice
from numbers import Integral
from typing import Final

from asyncinfer.cache.policies.lru import LRU
from asyncinfer.plugins.supervision import Limits, PluginFault, Supervisor
from asyncinfer.protocols.eviction import (
    CachedBlock,
    CapacityAware,
    ConversationAware,
    EvictionPolicy,
)

__all__ = ["GuardedPolicy"]

#: A debt of a second forgives calls that a busy machine delays. One call of more than a second
#: exceeds it, and so do a hundred calls of eleven milliseconds in a row.
LIMITS: Final = Limits(seconds=0.001, debt=1.0, raised=1)

#: Seconds that `opened` may take.
OPENING: Final = 1.0


class GuardedPolicy:
    """Owns the set of evictable blocks, passes events on to a policy, and checks its answers.

    A policy that raises, takes too long (`LIMITS`; each victim may take as long as a call), or
    whose answer is not one to `count` different evictable blocks, is replaced for good by
    `LRU`; `on_fault` is told once. The answer is checked as a whole before any of
    it is used, so a bad one changes nothing.

    Args:
        policy: not trusted, unless it is an `LRU` itself.
        on_fault: told of the fault, a `PluginError`.
        clock: monotonic seconds; without one, nothing is too slow.
        label: what messages call the policy.
    """

    def __init__(
        self,
        policy: EvictionPolicy,
        on_fault: Callable[[Exception], None] | None = None,
        clock: Callable[[], float] | None = None,
        label: str | None = None,
    ) -> None:
        self.policy = policy
        self._on_fault = on_fault
        self._faults: list[Exception] = []
        #: Whether the policy was replaced.
        self.broken = False
        #: None for an `LRU`, which need not be asked: its victims are what `evictable` begins with.
        self._supervisor: Supervisor | None = None
        if type(policy) is not LRU:
            self._supervisor = Supervisor(
                label or f"cache policy {type(policy).__qualname__}",
                LIMITS,
                consequence="LRU takes over",
                report=self._faults.append,
                clock=clock,
            )
        self._hears_of_conversations = isinstance(policy, ConversationAware)
        #: In the order of release.
        self.evictable: dict[int, CachedBlock] = {}

    def opened(self, capacity_blocks: int) -> None:
        """Tell the policy how many blocks there are, if it wants to know."""
        supervisor = self._supervisor
        if supervisor is not None and isinstance(self.policy, CapacityAware):
            with suppress(PluginFault):
                supervisor.call(self.policy, "opened", capacity_blocks, seconds=OPENING)
            self._replace_retired(supervisor)

    def published(self, block: CachedBlock) -> None:
        if self._supervisor is not None:
            self._tell(self._supervisor, "published", block)

    def released(self, number: int, block: CachedBlock) -> None:
        self.evictable[number] = block
        if self._supervisor is not None:
            self._tell(self._supervisor, "released", block)

    def reused(self, number: int, block: CachedBlock) -> None:
        self.evictable.pop(number, None)
        if self._supervisor is not None:
            self._tell(self._supervisor, "reused", block)

    def removed(self, number: int, block: CachedBlock) -> None:
        self.evictable.pop(number, None)
        if self._supervisor is not None:
            self._tell(self._supervisor, "removed", block)

    def conversation_changed(self, number: int, block: CachedBlock) -> None:
        """Tell the policy of an evictable block, if it wants to know."""
        supervisor = self._supervisor
        if supervisor is None or not self._hears_of_conversations:
            return
        if self.evictable.get(number) is block:
            self._tell(supervisor, "conversation_changed", block)

    def victims(self, count: int) -> list[int]:
        """One to `count` different evictable blocks; there must be one."""
        assert self.evictable
        assert count > 0
        supervisor, found = self._supervisor, None
        if supervisor is not None:
            with suppress(PluginFault):
                found = supervisor.call(
                    self.policy,
                    "victims",
                    count,
                    check=lambda answer: self._checked(answer, count),
                    seconds=LIMITS.seconds * (1 + count),
                )
            self._replace_retired(supervisor)
        return list(islice(self.evictable, count)) if found is None else found

    def _tell(self, supervisor: Supervisor, method: str, block: CachedBlock) -> None:
        try:
            supervisor.call(self.policy, method, block)
        except PluginFault:
            self._replace_retired(supervisor)
        else:
            if supervisor.retired is not None:
                self._replace_retired(supervisor)

    def _checked(self, answer: Sequence[int], count: int) -> list[int]:
        if not 1 <= len(answer) <= count:
            raise ValueError(f"{len(answer)} victims, asked for 1 to {count}")
        victims = [_number(block) for block in islice(answer, count)]
        for block in victims:
            if block not in self.evictable:
                raise ValueError(f"victim {block} is not an evictable block")
        if len(set(victims)) != len(answer):
            raise ValueError("the same victim twice")
        return victims

    def _replace_retired(self, supervisor: Supervisor) -> None:
        if supervisor.retired is not None:
            self.broken, self._supervisor = True, None
            self.policy = LRU()
            # Told last, for it may raise.
            if self._on_fault is not None:
                self._on_fault(self._faults.pop(0))
            self._faults.clear()


def _number(block: object) -> int:
    """A block number, which may be of numpy."""
    if type(block) is not int:
        if isinstance(block, bool) or not isinstance(block, Integral):
            raise TypeError(f"victim {block!r} is not a block number")
        block = int(block)
    return block
