"""`TurnLimits` bounds the requests submitted in one turn of an event loop."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Final

from asyncinfer.engine.loop_bridge import LoopBridge, Waiter

__all__ = ["TurnLimits"]

#: Short prompts prepared in one turn of a loop: each takes it a few tenths of a millisecond.
MOST: Final = 16


class TurnLimits:
    """Lets `MOST` submissions pass in one turn of each event loop, in their order."""

    def __init__(self) -> None:
        #: The limits of loops on which requests are submitted at the moment.
        self._limits: dict[LoopBridge, _TurnLimit] = {}

    async def wait(self, waiter: Waiter, ended: Callable[[], object] = bool) -> None:
        """Wait for a turn, or until `ended()`; return at once unless a crowd submits together."""
        bridge = waiter.bridge
        limit = self._limits.get(bridge)
        if limit is None:
            forget = partial(self._limits.pop, bridge, None)
            limit = self._limits[bridge] = _TurnLimit(bridge, forget)
        if limit.enter(waiter):
            return
        try:
            await waiter.wait_for(lambda: ended() or not limit.waits(waiter))
        finally:
            limit.leave(waiter)


class _TurnLimit:
    """The limit of one event loop. Used on that loop only."""

    def __init__(self, bridge: LoopBridge, on_idle: Callable[[], object]) -> None:
        """`on_idle` is called after a turn of the loop without a submission."""
        self._bridge = bridge
        self._on_idle = on_idle
        self._passed = 0
        #: Whether `_turn` is due.
        self._turning = False
        self._waiting: dict[Waiter, None] = {}

    def enter(self, waiter: Waiter) -> bool:
        """Whether the submission may pass at once. If not, `waits` says so until the waiter is
        woken to pass."""
        if not self._turning:
            self._turning = True
            self._bridge.soon(self._turn)
        # Submissions wait only where so many have passed.
        if self._passed < MOST:
            self._passed += 1
            return True
        self._waiting[waiter] = None
        return False

    def waits(self, waiter: Waiter) -> bool:
        return waiter in self._waiting

    def leave(self, waiter: Waiter) -> None:
        """Forget a submission, which may not have waited."""
        self._waiting.pop(waiter, None)

    def _turn(self) -> None:
        """Begin a new turn, after every other callback of the loop had one."""
        self._passed = 0
        while self._waiting and self._passed < MOST:
            waiter = next(iter(self._waiting))
            del self._waiting[waiter]
            self._passed += 1
            self._bridge.wake(waiter)
        self._turning = self._passed > 0
        if self._turning:
            self._bridge.soon(self._turn)
        else:
            self._on_idle()
