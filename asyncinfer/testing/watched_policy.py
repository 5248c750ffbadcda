"""`WatchedPolicy`: checks each answer of a cache policy against the rules of its protocol."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import astuple
from typing import Any

from asyncinfer.protocols import CachedBlock, EvictionPolicy
from asyncinfer.testing.rule_error import RuleError

__all__ = ["WatchedPolicy"]


class WatchedPolicy:
    """Passes everything on. Raises `RuleError` where the policy breaks a rule."""

    def __init__(self, policy: EvictionPolicy) -> None:
        self._policy = policy
        self._evictable: set[int] = set()
        #: Every answer, for comparisons.
        self.answers: list[list[int]] = []

    def published(self, block: CachedBlock) -> None:
        self._tell("published", self._policy.published, block)

    def released(self, block: CachedBlock) -> None:
        self._evictable.add(block.block)
        self._tell("released", self._policy.released, block)

    def reused(self, block: CachedBlock) -> None:
        self._evictable.discard(block.block)
        self._tell("reused", self._policy.reused, block)

    def removed(self, block: CachedBlock) -> None:
        self._evictable.discard(block.block)
        self._tell("removed", self._policy.removed, block)

    def victims(self, count: int) -> Sequence[int]:
        call = f"victims({count})"
        answer = _call(call, self._policy.victims, count)
        if not isinstance(answer, Sequence) or isinstance(answer, str | bytes):
            raise RuleError("shape", f"{call} gave {answer!r}, not a sequence of block numbers")
        found = list(answer)
        for block in found:
            if isinstance(block, bool) or not isinstance(block, int):
                raise RuleError("shape", f"{call} named {block!r}, not a block number")
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

    def _tell(self, name: str, method: Callable[[CachedBlock], object], block: CachedBlock) -> None:
        before = astuple(block)
        _call(f"{name}(block {block.block})", method, block)
        if astuple(block) != before:
            raise RuleError("read only", f"{name}(block {before[0]}) wrote to the block")


def _call(what: str, method: Callable[[Any], Any], argument: Any) -> Any:
    try:
        return method(argument)
    except Exception as error:
        raise RuleError("never raises", f"{what} raised {error!r}") from error
