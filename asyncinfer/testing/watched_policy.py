"""`WatchedPolicy`: checks each call of a cache policy against the rules of its protocol."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import FrozenInstanceError, astuple
from time import perf_counter
from typing import Any, Final

from asyncinfer.plugins.supervision import interrupted, recorded
from asyncinfer.protocols import CachedBlock, CapacityAware, EvictionPolicy
from asyncinfer.testing.rule_error import RuleError

__all__ = ["WatchedPolicy"]

#: Seconds that the engine allows a call, and each victim.
ALLOWED: Final = 0.001
#: Calls of one method in a row that take longer: a busy machine does not slow so many.
LATE: Final = 10


class WatchedPolicy:
    """Passes everything on. Raises `RuleError` where the policy breaks a rule."""

    def __init__(self, policy: EvictionPolicy) -> None:
        self._policy = policy
        self._evictable: set[int] = set()
        #: How many calls of a method in a row took too long.
        self._late: dict[str, int] = {}
        #: Every answer, for comparisons.
        self.answers: list[list[int]] = []

    def opened(self, capacity_blocks: int) -> None:
        if isinstance(self._policy, CapacityAware):
            self._call("opened", f"opened({capacity_blocks})", capacity_blocks)

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

    def victims(self, count: int) -> Sequence[int]:
        call = f"victims({count})"
        answer = self._call("victims", call, count, allowed=ALLOWED * (1 + count))
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

    def _tell(self, method: str, block: CachedBlock) -> None:
        before = astuple(block)
        self._call(method, f"{method}(block {block.block})", block)
        if astuple(block) != before:
            raise RuleError("read only", f"{method}(block {before[0]}) wrote to the block")

    def _call(self, method: str, what: str, argument: Any, allowed: float = ALLOWED) -> Any:
        began = perf_counter()
        try:
            with recorded(f"cache policy {type(self._policy).__qualname__}", method):
                answer = getattr(self._policy, method)(argument)
        except FrozenInstanceError as error:
            raise RuleError("read only", f"{what} raised {error!r}") from error
        except BaseException as error:
            if interrupted(error):
                raise
            raise RuleError("never raises", f"{what} raised {error!r}") from error
        spent = perf_counter() - began
        late = self._late[method] = self._late.get(method, 0) + 1 if spent > allowed else 0
        if late == LATE:
            raise RuleError(
                "time",
                f"{what} took {spent * 1e3:.3g} ms, as {LATE} calls in a row took too long; the "
                f"engine, which allows {allowed * 1e3:g} ms, would replace the policy",
            )
        return answer
