"""A `LoopBridge` for each kind of event loop."""

from __future__ import annotations

import asyncio
import sys
import types
from collections.abc import Awaitable, Callable, Generator
from typing import Any

from asyncinfer.engine.loop_bridge import LoopBridge, Waiter

__all__ = ["current_bridge"]


class AsyncioBridge(LoopBridge):
    """An asyncio loop, or one with the same interface, such as uvloop's."""

    __slots__ = ("_loop",)

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        super().__init__()
        self._loop = loop

    def post(self, function: Callable[..., object], *args: Any) -> None:
        try:
            self._loop.call_soon_threadsafe(function, *args)
        except Exception:
            # A closed loop raises `RuntimeError`, and a loop may close between any check and this
            # call. A loop that raises anything else cannot be reached either. The exception stays
            # here, since the streams of other loops must still be told of their ends.
            self.closed = True

    def soon(self, function: Callable[..., object], *args: Any) -> None:
        self._loop.call_soon(function, *args)

    def probe(self) -> bool:
        self.closed = self.closed or self._loop.is_closed()
        return not self.closed

    def here(self) -> bool:
        return asyncio._get_running_loop() is self._loop

    def cancelled(self) -> bool:
        task = asyncio.current_task(self._loop)
        return task is not None and task.cancelling() > 0

    def begin_wait(self, waiter: Waiter) -> Awaitable[object] | None:
        if asyncio._get_running_loop() is not self._loop:
            return None
        future = waiter.waiting = self._loop.create_future()
        return future

    def wake(self, waiter: Waiter) -> None:
        future = waiter.waiting
        if future is not None and not future.done():
            future.set_result(None)

    async def checkpoint(self) -> None:
        await asyncio.sleep(0)


class _News:
    """The result of a task's wait in trio. trio would make an `outcome.Value` for each wake-up,
    which can be used only once; this object serves all wake-ups."""

    def unwrap(self) -> None: ...


_NEWS = _News()


class TrioBridge(LoopBridge):
    """A trio run."""

    __slots__ = (
        "_current_task",
        "_current_token",
        "_lowlevel",
        "_reschedule",
        "_run_finished",
        "_sleep",
        "_token",
    )

    def __init__(self, trio: Any, token: Any) -> None:
        super().__init__()
        self._token = token
        self._lowlevel = trio.lowlevel
        self._current_task = trio.lowlevel.current_task
        self._current_token = trio.lowlevel.current_trio_token
        self._reschedule = trio.lowlevel.reschedule
        self._run_finished = trio.RunFinishedError
        succeeded = trio.lowlevel.Abort.SUCCEEDED
        waiting = trio.lowlevel.wait_task_rescheduled(lambda _: succeeded)
        #: What a waiting task yields to trio, which only reads it. Making it takes a microsecond,
        #: so one object serves every wait.
        self._sleep = waiting.send(None)
        waiting.close()

    def post(self, function: Callable[..., object], *args: Any) -> None:
        try:
            self._token.run_sync_soon(function, *args)
        except self._run_finished:
            self.closed = True

    def soon(self, function: Callable[..., object], *args: Any) -> None:
        self.post(function, *args)

    def probe(self) -> bool:
        self.post(_nothing)
        return not self.closed

    def here(self) -> bool:
        try:
            return self._current_token() is self._token
        except RuntimeError:
            return False

    def begin_wait(self, waiter: Waiter) -> Awaitable[object] | None:
        try:
            task = self._current_task()
        except RuntimeError:
            return None
        if task is not waiter.last_task:
            if self._current_token() is not self._token:
                return None
            waiter.last_task = task
        waiter.waiting = task
        return self._sleep_until_woken(waiter)

    @types.coroutine
    def _sleep_until_woken(self, waiter: Waiter) -> Generator[object, Any, None]:
        # trio clears this field when it reschedules the task, also after a cancellation.
        waiter.waiting.custom_sleep_data = waiter
        # No variable keeps the result: a cancellation's traceback refers to this frame.
        (yield self._sleep).unwrap()

    def wake(self, waiter: Waiter) -> None:
        task = waiter.waiting
        if task is not None and task.custom_sleep_data is waiter:
            self._reschedule(task, _NEWS)

    async def checkpoint(self) -> None:
        await self._lowlevel.checkpoint()


def current_bridge(known: dict[object, LoopBridge]) -> LoopBridge:
    """The bridge of the running event loop. A new one is added to `known`. Raises `RuntimeError`
    outside an event loop."""
    trio = sys.modules.get("trio")
    # The attribute is missing while another thread imports trio.
    lowlevel = getattr(trio, "lowlevel", None)
    if lowlevel is not None and lowlevel.in_trio_task():
        key: object = lowlevel.current_trio_token()
    else:
        key = asyncio.get_running_loop()
    bridge = known.get(key)
    if bridge is None:
        fresh = AsyncioBridge(key) if isinstance(key, asyncio.AbstractEventLoop) else None
        bridge = known.setdefault(key, fresh or TrioBridge(trio, key))
    return bridge


def _nothing() -> None: ...
