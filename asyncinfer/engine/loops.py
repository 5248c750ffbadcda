"""The kinds of event loop there are a `Port` for."""

from __future__ import annotations

import asyncio
import sys
import types
from collections.abc import Awaitable, Callable, Generator
from typing import Any

from asyncinfer.engine.ports import Cell, Port

__all__ = ["current_port"]


class AsyncioPort(Port):
    """asyncio and everything that keeps to its interface, such as uvloop."""

    __slots__ = ("_loop",)

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        super().__init__()
        self._loop = loop

    def post(self, function: Callable[..., object], *args: Any) -> None:
        try:
            self._loop.call_soon_threadsafe(function, *args)
        except Exception:
            # A closed loop raises `RuntimeError`; it may close between any check and this call.
            # Whatever else a loop of the host's raises, nothing reaches its tasks any more either,
            # and the streams of others must hear of their ends all the same.
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

    def announce(self, cell: Cell) -> bool:
        if asyncio._get_running_loop() is not self._loop:
            return False
        cell.waiter = self._loop.create_future()
        return True

    def park(self, cell: Cell) -> Awaitable[object]:
        waiter: asyncio.Future[None] = cell.waiter
        return waiter

    def wake(self, cell: Cell) -> None:
        waiter = cell.waiter
        if waiter is not None and not waiter.done():
            waiter.set_result(None)

    async def checkpoint(self) -> None:
        await asyncio.sleep(0)


class _News:
    """Handed to a task that trio wakes. An `outcome.Value`, of which trio would make one per
    wake-up, is for one use only; this one is not."""

    def unwrap(self) -> None: ...


_NEWS = _News()


class TrioPort(Port):
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
        #: What a task that waits hands to trio, which only reads it. Made once: a wait would take
        #: two coroutines and an object more, a microsecond.
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

    def announce(self, cell: Cell) -> bool:
        try:
            task = self._current_task()
        except RuntimeError:
            return False
        if task is not cell.reader:
            if self._current_token() is not self._token:
                return False
            cell.reader = task
        cell.waiter = task
        return True

    @types.coroutine
    def park(self, cell: Cell) -> Generator[object, Any, None]:
        # trio clears this when it reschedules the task, whether we or a cancellation wake it.
        cell.waiter.custom_sleep_data = cell
        news = yield self._sleep
        news.unwrap()

    def wake(self, cell: Cell) -> None:
        task = cell.waiter
        if task is not None and task.custom_sleep_data is cell:
            self._reschedule(task, _NEWS)

    async def checkpoint(self) -> None:
        await self._lowlevel.checkpoint()


def current_port(known: dict[object, Port]) -> Port:
    """The port of the running event loop, from `known` or new in it. Raises `RuntimeError` outside
    an event loop."""
    trio = sys.modules.get("trio")
    # Without it, another thread is in the middle of importing trio.
    lowlevel = getattr(trio, "lowlevel", None)
    if lowlevel is not None and lowlevel.in_trio_task():
        key: object = lowlevel.current_trio_token()
    else:
        key = asyncio.get_running_loop()
    port = known.get(key)
    if port is None:
        fresh = AsyncioPort(key) if isinstance(key, asyncio.AbstractEventLoop) else None
        port = known.setdefault(key, fresh or TrioPort(trio, key))
    return port


def _nothing() -> None: ...
