"""`VirtualLoop`: an asyncio event loop whose clock and whose turns are the simulation's."""

from __future__ import annotations

import asyncio
from asyncio import events
from collections import deque
from collections.abc import Callable, Coroutine, Generator
from contextvars import Context, copy_context
from heapq import heapify, heappop, heappush
from itertools import count
from typing import Any, TypeAlias, TypeVar, TypeVarTuple, Unpack

__all__ = ["VirtualLoop"]

T = TypeVar("T")
Args = TypeVarTuple("Args")
Callback: TypeAlias = tuple[asyncio.Handle, Context, Callable[..., object], tuple[Any, ...]]


class VirtualLoop(asyncio.BaseEventLoop):
    """Runs one callback when it is told to, in the order asyncio promises. It has no selector and
    never sleeps; tasks, futures and timers on it are asyncio's own."""

    def __init__(self, clock: Callable[[], float]) -> None:
        # Not asyncio's: it would make what a loop needs that runs by itself.
        self._now = clock
        #: What runs, unless its handle is cancelled.
        self._queue: deque[Callback] = deque()
        self._timers: list[tuple[float, int, Callback]] = []
        self._order = count()
        self._over = False
        #: What callbacks raised, and what asyncio reports of tasks and futures.
        self.problems: list[dict[str, Any]] = []

    # -- the simulation's side -----------------------------------------------------------------

    @property
    def next_timer(self) -> float:
        """When the next timer is due, in seconds; inf without one."""
        return self._timers[0][0] if self._timers else float("inf")

    def run_one(self) -> bool:
        """Run the next callback, timers that are due included; whether there was one."""
        return self._run(1) == 1

    def run_ready(self, most: int = 100_000) -> int:
        """Run callbacks until none is ready; how many. Raises `AssertionError` after `most`."""
        timers = self._timers
        if not self._queue and (not timers or timers[0][0] > self._now()):
            return 0
        ran = self._run(most)
        if ran == most:
            raise AssertionError(f"an event loop is still busy after {most} callbacks")
        return ran

    def _run(self, most: int) -> int:
        """Run `most` callbacks, fewer if no more are ready; how many."""
        queue, timers, before = self._queue, self._timers, events._get_running_loop()
        call: Callback | None = None
        events._set_running_loop(self)
        try:
            for ran in range(most):
                if timers and timers[0][0] <= (now := self._now()):
                    while timers and timers[0][0] <= now:
                        queue.append(heappop(timers)[2])
                if not queue:
                    return ran
                call = queue.popleft()
                if not call[0].cancelled():
                    try:
                        call[1].run(call[2], *call[3])
                    except Exception as error:
                        self.problems.append({"message": "a callback raised", "exception": error})
        finally:
            events._set_running_loop(before)
            # The traceback of a cancelled task may hold this frame.
            call = None
        return most

    # -- asyncio's side ------------------------------------------------------------------------

    def time(self) -> float:
        return self._now()

    def call_soon(
        self,
        callback: Callable[[Unpack[Args]], object],
        *args: *Args,
        context: Context | None = None,
    ) -> asyncio.Handle:
        if self._over:
            raise RuntimeError("Event loop is closed")
        if context is None:
            context = copy_context()
        handle = asyncio.Handle(callback, args, self, context)
        self._queue.append((handle, context, callback, args))
        return handle

    call_soon_threadsafe = call_soon

    def call_later(
        self,
        delay: float,
        callback: Callable[[Unpack[Args]], object],
        *args: *Args,
        context: Context | None = None,
    ) -> asyncio.TimerHandle:
        return self.call_at(self._now() + delay, callback, *args, context=context)

    def call_at(
        self,
        when: float,
        callback: Callable[[Unpack[Args]], object],
        *args: *Args,
        context: Context | None = None,
    ) -> asyncio.TimerHandle:
        if self._over:
            raise RuntimeError("Event loop is closed")
        if context is None:
            context = copy_context()
        handle = asyncio.TimerHandle(when, callback, args, self, context)
        call: Callback = handle, context, callback, args
        heappush(self._timers, (when, next(self._order), call))
        return handle

    def _timer_handle_cancelled(self, handle: asyncio.TimerHandle) -> None:
        # At once: it holds its context.
        self._timers[:] = [entry for entry in self._timers if entry[2][0] is not handle]
        heapify(self._timers)

    def create_future(self) -> asyncio.Future[Any]:
        return asyncio.Future(loop=self)

    def create_task(
        self,
        coro: Generator[Any, None, T] | Coroutine[Any, Any, T],
        *,
        name: object = None,
        context: Context | None = None,
    ) -> asyncio.Task[T]:
        return asyncio.Task(
            coro, loop=self, name=None if name is None else str(name), context=context
        )

    def get_task_factory(self) -> None:
        return None

    def get_debug(self) -> bool:
        return False

    def is_running(self) -> bool:
        return events._get_running_loop() is self

    def is_closed(self) -> bool:
        return self._over

    def close(self) -> None:
        """Drop what is left, as a program does that ends its run without waiting."""
        self._over = True
        self._queue.clear()
        self._timers.clear()

    def call_exception_handler(self, context: dict[str, Any]) -> None:
        self.problems.append(context)

    def __repr__(self) -> str:
        return f"<VirtualLoop {'closed' if self._over else 'open'} at {self._now():g} s>"
