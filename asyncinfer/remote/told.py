"""`ToldPolicy`: an eviction policy that reports which blocks come and go."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

from asyncinfer.protocols import CachedBlock, CapacityAware, ConversationAware, EvictionPolicy

__all__ = ["ToldPolicy"]


class ToldPolicy:
    """Passes every call on to another policy, and records published and removed blocks until
    `changes` is called."""

    def __init__(self, policy: EvictionPolicy) -> None:
        self._policy = policy
        # The decode thread appends and another thread reads: each call on a deque is atomic.
        self._changes: deque[tuple[bytes, bool]] = deque()

    def changes(self) -> list[tuple[bytes, bool]]:
        """Keys since the last call, each with whether its block is there now, in order. Any thread,
        but one at a time."""
        return [self._changes.popleft() for _ in range(len(self._changes))]

    def opened(self, capacity_blocks: int) -> None:
        if isinstance(self._policy, CapacityAware):
            self._policy.opened(capacity_blocks)

    def conversation_changed(self, block: CachedBlock) -> None:
        if isinstance(self._policy, ConversationAware):
            self._policy.conversation_changed(block)

    def published(self, block: CachedBlock) -> None:
        self._changes.append((block.key, True))
        self._policy.published(block)

    def released(self, block: CachedBlock) -> None:
        self._policy.released(block)

    def reused(self, block: CachedBlock) -> None:
        self._policy.reused(block)

    def removed(self, block: CachedBlock) -> None:
        self._changes.append((block.key, False))
        self._policy.removed(block)

    def victims(self, count: int) -> Sequence[int]:
        return self._policy.victims(count)
