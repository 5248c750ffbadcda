"""`EventLoopThread`: an event loop of its own, for programs that have none."""

from __future__ import annotations

import asyncio
import threading
import weakref
from collections.abc import Awaitable, Callable
from contextlib import suppress
from functools import partial
from typing import Any, Generic, TypeVar

from asyncinfer.engine import process
from asyncinfer.errors import EngineClosed, EngineDead

__all__ = ["EventLoopThread"]

T = TypeVar("T")


class EventLoopThread:
    """Runs asynchronous calls of other threads, which wait for them. It is a daemon thread: a
    program that forgets to stop it can end."""

    def __init__(self, name: str) -> None:
        """Raises `EngineDead` where no thread can be started."""
        self._process = process.pid
        self._stopped = False
        #: Calls that have not returned.
        self._calls: set[_LoopCall[Any]] = set()
        started: _Handed[tuple[asyncio.AbstractEventLoop, asyncio.Event]] = _Handed()
        forgotten = _Forgotten()
        # An object that is forgotten, or interrupted in this constructor, leaves no thread.
        weakref.finalize(self, _stop, forgotten)
        self._thread = threading.Thread(
            target=partial(_run, started, forgotten, self._calls), name=name, daemon=True
        )
        try:
            self._thread.start()
        except RuntimeError as error:
            raise EngineDead(f"the engine's event loop could not be started: {error}") from error
        started.wait()
        self._loop, self._stopping = started.taken()

    @property
    def here(self) -> bool:
        """Whether this is the thread's process, and not a fork of it."""
        return process.pid == self._process

    def run(self, call: Callable[[], Awaitable[T]]) -> T:
        """Run `call` on the loop and wait for its result. If the waiting thread is interrupted, as
        by Ctrl-C, `call` is cancelled and has ended when this raises. Raises `EngineClosed` in a
        fork and once the loop was stopped."""
        if not self.here:
            raise EngineClosed(
                f"this engine lives in process {self._process}; open another one in its fork"
            )
        if threading.current_thread() is self._thread:
            raise RuntimeError("a SyncEngine cannot be called on its own event loop")
        running = _LoopCall(call)
        try:
            # Before it is posted: whatever the loop does not begin is found here when that ends.
            self._calls.add(running)
            self._post(running.begin)
            running.answer.wait()
        except BaseException:
            if not running.answer.given:
                self._cancel(running)
            raise
        finally:
            self._calls.discard(running)
        return running.answer.taken()

    def stop(self) -> None:
        """End the loop, cancelling what it runs, and wait for the thread."""
        if self.here:
            self.stop_soon()
            self._thread.join()

    def stop_soon(self) -> None:
        """Have the loop end. Takes no lock, so that a finalizer may call it on any thread."""
        if self.here:
            self._stopped = True
            with suppress(RuntimeError):
                # The loop may be closed already.
                self._loop.call_soon_threadsafe(self._stopping.set)

    def _cancel(self, running: _LoopCall[Any]) -> None:
        """Cancel a call, and wait until it is over."""
        try:
            self._post(running.cancel)
        except EngineClosed:
            # The loop cancels what it runs.
            self._thread.join()
        else:
            running.answer.wait()

    def _post(self, callback: Callable[[], object]) -> None:
        """Have the loop call it, after all that was posted before, unless that ends first. Raises
        `EngineClosed` where it has ended."""
        if self._stopped:
            raise EngineClosed("the engine is closed")
        try:
            self._loop.call_soon_threadsafe(callback)
        except RuntimeError:
            if not self._loop.is_closed():
                # A signal handler of the program's raised it.
                raise
            raise EngineClosed("the engine is closed") from None


class _Handed(Generic[T]):
    """What one thread hands to another that waits for it.

    Ctrl-C may come at any point of the thread that waits. One in the middle of `Future` or `Event`
    would leave their locks taken, and the other thread would wait for these. The lock here is taken
    by a single call, which an interrupt precedes or follows.
    """

    def __init__(self) -> None:
        #: Whether there is a value or an error. Set before those who wait may go on.
        self.given = False
        self._taken: list[T | BaseException] = []
        self._waited = threading.Lock()
        self._waited.acquire()

    def give(self, value: T | BaseException) -> None:
        """Hand over a value, or an error to raise. By one thread; the first counts."""
        if not self.given:
            self._taken.append(value)
            self.given = True
            self._waited.release()

    def wait(self) -> None:
        """Wait for it. By one thread, and again where that was interrupted."""
        if not self.given:
            self._waited.acquire()

    def taken(self) -> T:
        """The value, once. Raises the error."""
        value = self._taken.pop()
        try:
            if isinstance(value, BaseException):
                raise value
            return value
        finally:
            # The error's traceback refers to this frame.
            del value


class _LoopCall(Generic[T]):
    """One call, on its way or running. All but its constructor runs on the loop."""

    def __init__(self, call: Callable[[], Awaitable[T]]) -> None:
        self._call = call
        self._task: asyncio.Task[T] | None = None
        self.answer: _Handed[T] = _Handed()

    def begin(self) -> None:
        if not self.answer.given:
            self._task = asyncio.get_running_loop().create_task(self._perform())
            self._task.add_done_callback(self._tell)

    def cancel(self) -> None:
        if self._task is not None:
            self._task.cancel()
        else:
            # The waiting thread was interrupted before it had posted `begin`.
            self.closed()

    def closed(self) -> None:
        """End it without a result: the loop has ended, or nobody waits for one."""
        self.answer.give(EngineClosed("the engine is closed"))

    async def _perform(self) -> T:
        return await self._call()

    def _tell(self, task: asyncio.Task[T]) -> None:
        if task.cancelled():
            self.closed()
        else:
            error = task.exception()
            self.answer.give(task.result() if error is None else error)


class _Forgotten:
    """Whether nobody can use a loop any more. A finalizer sets it, without a lock."""

    def __init__(self) -> None:
        self.is_set = False
        #: Ends the loop; None before it runs.
        self.stop: Callable[[], object] | None = None


def _stop(forgotten: _Forgotten) -> None:
    forgotten.is_set = True
    if forgotten.stop is not None:
        with suppress(RuntimeError):
            # The loop may be closed already.
            forgotten.stop()


def _run(started: _Handed[Any], forgotten: _Forgotten, calls: set[_LoopCall[Any]]) -> None:
    """The thread: the loop, and after that the end of what it did not begin."""
    try:
        asyncio.run(_serve(started, forgotten))
    finally:
        for call in list(calls):
            call.closed()


async def _serve(started: _Handed[Any], forgotten: _Forgotten) -> None:
    loop, stopping = asyncio.get_running_loop(), asyncio.Event()
    forgotten.stop = partial(loop.call_soon_threadsafe, stopping.set)
    started.give((loop, stopping))
    # In this order: a finalizer that runs meanwhile finds `stop`, or is found here.
    if not forgotten.is_set:
        await stopping.wait()
    # What still runs is cancelled by `asyncio.run`.
