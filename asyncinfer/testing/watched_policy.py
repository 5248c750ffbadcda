"""`WatchedPolicy`: checks each call of a cache policy against the rules of its protocol."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import fields
from numbers import Integral
from operator import attrgetter
from typing import Final

from asyncinfer.protocols import CachedBlock, CapacityAware, ConversationAware, EvictionPolicy
from asyncinfer.testing.rule_error import RuleError, WatchedCalls

__all__ = ["WatchedPolicy"]

#: Seconds that the engine allows a call, and each victim.
ALLOWED: Final = 0.001
#: All that a block says, as a tuple.
_fields_of: Final = attrgetter(*(field.name for field in fields(CachedBlock)))
#: Late calls of one method in a row that break the rule: a busy machine slows fewer.
LATE: Final = 10


class WatchedPolicy:
    """Passes every call on. Raises `RuleError` where the policy breaks a rule."""

    def __init__(self, policy: EvictionPolicy) -> None:
        self._policy = policy
        self._converses = isinstance(policy, ConversationAware)
        self._evictable: set[int] = set()
        self._calls = WatchedCalls(policy, "cache policy", LATE)
        #: Every answer, for comparisons.
        self.answers: list[list[int]] = []

    def opened(self, capacity_blocks: int) -> None:
        if isinstance(self._policy, CapacityAware):
            what = f"opened({capacity_blocks})"
            self._calls.call("opened", lambda: what, capacity_blocks, allowed=ALLOWED)

    def published(self, block: CachedBlock) -> None:
        self._tell("published", block)

    def released(self, block: CachedBlock) -> None:
        self._evictable.add(block.block)
        self._tell("released", block)

    def reused(self, block: CachedBlock) -> None:
        self._evictable.discard(block.block)
        self._tell("reused", block)

    def removed(self, block: CachedBlock) -> None:
        self._evictable.discard(block.block)
        self._tell("removed", block)

    def conversation_changed(self, block: CachedBlock) -> None:
        if self._converses:
            self._tell("conversation_changed", block)

    def victims(self, count: int) -> Sequence[int]:
        call = f"victims({count})"
        answer = self._calls.call("victims", lambda: call, count, allowed=ALLOWED * (1 + count))
        if not isinstance(answer, Sequence) or isinstance(answer, str | bytes):
            raise RuleError("shape", f"{call} gave {answer!r}, not a sequence of block numbers")
        for block in answer:
            if isinstance(block, bool) or not isinstance(block, Integral):
                raise RuleError("shape", f"{call} named {block!r}, not a block number")
        found = [int(block) for block in answer]
        if len(found) > count:
            raise RuleError("count", f"{call} named {len(found)} blocks: {found}")
        if len(set(found)) != len(found):
            raise RuleError("different", f"{call} named a block twice: {found}")
        wrong = [block for block in found if block not in self._evictable]
        if wrong:
            raise RuleError("evictable", f"{call} named {wrong[0]}, in use or not in the cache")
        if self._evictable and not found:
            few = sorted(self._evictable)[:5]
            raise RuleError("at least one", f"{call} named none, though {few} can go")
        self.answers.append(found)
        return found

    def _tell(self, method: str, block: CachedBlock) -> None:
        before = _fields_of(block)
        what = f"{method}(block {block.block})"
        self._calls.call(method, lambda: what, block, allowed=ALLOWED)
        if _fields_of(block) != before:
            raise RuleError("read only", f"{method}(block {before[0]}) wrote to the block")
