"""`Exchange`: one request to an ASGI application in this process, its answer read as it comes."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Awaitable, Callable, MutableMapping
from contextlib import AbstractContextManager, suppress
from typing import Any, Final

import anyio

__all__ = ["App", "Broken", "Exchange"]

Message = MutableMapping[str, Any]
App = Callable[
    [Message, Callable[[], Awaitable[Message]], Callable[[Message], Awaitable[None]]],
    Awaitable[None],
]
Loop = asyncio.AbstractEventLoop
#: Parts of the answer that may wait to be read before the application has to wait.
MOST_UNREAD: Final = 64
#: Seconds until the application is cancelled again: a task that is cancelled by a scope of its own
#: at the same moment takes both cancellations for that one.
AGAIN: Final = 0.1


class Broken(Exception):
    """The application ended before its answer did; `__cause__` says why, where it raised."""


class Exchange:
    """Runs the application in a task of its own on this event loop until `close`.

    An exchange closed before the answer's end sends the application a disconnect and cancels it.
    Garbage collection closes an exchange, too.
    """

    def __init__(self, app: App, scope: Message, body: bytes) -> None:
        self._run = _Run(app, scope, body)

    async def begin(self, seconds: float | None = None) -> tuple[int, list[tuple[bytes, bytes]]]:
        """Status and headers, once the application has sent them. Raises `Broken`, and
        `TimeoutError` after so many seconds."""
        run = self._run
        while run.start is None:
            if run.over:
                raise run.broken()
            await run.wait(seconds)
        return run.start["status"], list(run.start["headers"])

    async def read(self, seconds: float | None = None) -> bytes | None:
        """The parts of the body that have arrived; None after the last. Raises as `begin` does."""
        run = self._run
        while not run.parts:
            if run.complete:
                return None
            if run.over:
                raise run.broken()
            await run.wait(seconds)
        # Joined, since a client takes time for each part.
        parts = b"".join(run.parts)
        run.parts.clear()
        if run.room is not None:
            run.room.set()
        return parts

    async def close(self) -> None:
        """Disconnect and cancel the application, unless its answer is whole; it has ended when this
        returns. A second call does nothing."""
        self._run.leave()
        if not self._run.complete:
            with anyio.CancelScope(shield=True):
                while not self._run.over:
                    await self._run.wait()

    def __del__(self) -> None:
        self._run.forget()


class _Run:
    """The application's side. It refers to no `Exchange`, so that one can be collected."""

    def __init__(self, app: App, scope: Message, body: bytes) -> None:
        self._app = app
        self._scope = scope
        self._requests: list[Message] = [{"type": "http.request", "body": body}]
        self._gone = False
        #: Made when somebody waits: an event costs as much as all else here.
        self._left: anyio.Event | None = None
        #: Whoever waits, and until when, by the loop's clock.
        self._news: dict[asyncio.Future[bool] | anyio.Event, float] = {}
        self._timer: asyncio.TimerHandle | None = None
        self._error: Exception | None = None
        self._loop = _asyncio_loop()
        self._soon = _loop_caller(self._loop)
        self.start: Message | None = None
        self.parts: list[bytes] = []
        self.room: anyio.Event | None = None
        #: Whether the last part of the body has come.
        self.complete = False
        self.over = False
        self._cancel = self._spawn()

    async def wait(self, seconds: float | None = None) -> None:
        """Wait until something changes. Raises `TimeoutError` after so many seconds."""
        if self._loop is None:
            event = anyio.Event()
            self._news[event] = math.inf
            try:
                with anyio.fail_after(seconds):
                    await event.wait()
            finally:
                self._news.pop(event, None)
            return
        # A future, since a scope and an event of anyio cost four times as much.
        news: asyncio.Future[bool] = self._loop.create_future()
        due = self._news[news] = math.inf if seconds is None else self._loop.time() + seconds
        # One timer serves all waits of an answer: a new one would cost as much as a wait.
        if due < (math.inf if self._timer is None else self._timer.when()):
            self._look_at_time(self._loop)
        try:
            if not await news:
                raise TimeoutError
        finally:
            # A waiter that was not woken is removed here.
            self._news.pop(news, None)

    def leave(self) -> None:
        if not self.over and not self._gone:
            self._gone = True
            if self._left is not None:
                self._left.set()
            if not self.complete:
                self._cancel_until_over()

    def forget(self) -> None:
        """`leave`, from any thread."""
        if not self.over and not self._gone:
            # A closed loop has cancelled the task already.
            with suppress(RuntimeError):
                self._soon(self.leave)

    def broken(self) -> Broken:
        error = Broken("the application ended without a whole answer")
        # Not kept here: its traceback refers to this object.
        error.__cause__, self._error = self._error, None
        return error

    def _spawn(self) -> Callable[[], object]:
        """Run the application in a task that no other task waits for. Returns what cancels it."""
        if self._loop is None:
            import trio

            scope = trio.CancelScope()
            trio.lowlevel.spawn_system_task(self._answer_within, scope)
            return scope.cancel
        _RUNNING.add(self)
        task = self._loop.create_task(self._answer())
        # A done callback also runs for a task that was cancelled before it began.
        task.add_done_callback(self._end)
        # A scope of anyio would cost as much as the task.
        return task.cancel

    async def _answer(self) -> None:
        try:
            await self._app(self._scope, self._receive, self._send)
        except Exception as error:
            self._error = error

    async def _answer_within(self, scope: AbstractContextManager[object]) -> None:
        try:
            with scope:
                # A task of trio that is cancelled before it began still runs to its first wait.
                if not self._gone:
                    await self._answer()
        finally:
            self._end()

    def _end(self, _: object = None) -> None:
        self.over = True
        if self._timer is not None:
            self._timer.cancel()
        _RUNNING.discard(self)
        self._tell()

    def _cancel_until_over(self) -> None:
        if not self.over:
            self._cancel()
            if self._loop is not None:
                self._loop.call_later(AGAIN, self._cancel_until_over)

    async def _receive(self) -> Message:
        if self._requests:
            return self._requests.pop()
        if not self._gone:
            self._left = self._left or anyio.Event()
            await self._left.wait()
        return {"type": "http.disconnect"}

    async def _send(self, message: Message) -> None:
        if message["type"] == "http.response.start":
            self.start = message
        elif message["type"] == "http.response.body":
            if body := message.get("body", b""):
                self.parts.append(body)
            self.complete = not message.get("more_body", False)
        self._tell()
        # After the last part nothing has to wait, and a reader that leaves cancels nothing.
        while len(self.parts) >= MOST_UNREAD and not self.complete:
            self.room = anyio.Event()
            await self.room.wait()

    def _look_at_time(self, loop: Loop) -> None:
        """End the waits whose time is up, and look again when the next one's is."""
        if self._timer is not None:
            self._timer.cancel()
        self._timer = None
        now, first = loop.time(), math.inf
        for news, due in self._news.items():
            if due > now:
                first = min(first, due)
            elif isinstance(news, asyncio.Future) and not news.done():
                news.set_result(False)
        if first < math.inf:
            self._timer = loop.call_at(first, self._look_at_time, loop)

    def _tell(self) -> None:
        """Wake all waiters."""
        for news in self._news:
            if isinstance(news, anyio.Event):
                news.set()
            elif not news.done():
                news.set_result(True)
        self._news.clear()


#: Running exchanges are kept here, since an event loop keeps no task alive.
_RUNNING: Final[set[_Run]] = set()


def _loop_caller(loop: Loop | None) -> Callable[[Callable[[], object]], object]:
    """A function that has the running loop call something soon, from any thread; None on trio."""
    if loop is not None:
        return loop.call_soon_threadsafe
    import trio

    return trio.lowlevel.current_trio_token().run_sync_soon


def _asyncio_loop() -> Loop | None:
    """The running loop; None where it is trio's."""
    try:
        return asyncio.get_running_loop()
    except RuntimeError:
        return None
