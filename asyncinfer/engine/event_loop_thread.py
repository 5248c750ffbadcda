"""`EventLoopThread`: an event loop of its own, for programs that have none."""

from __future__ import annotations

import asyncio
import threading
import weakref
from collections.abc import Awaitable, Callable
from concurrent.futures import CancelledError, Future
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
        started: Future[tuple[asyncio.AbstractEventLoop, asyncio.Event]] = Future()
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
        self._loop, self._stopping = started.result()

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
            return running.answer.result()
        except CancelledError:
            # The loop was stopped, and cancelled what it ran.
            raise EngineClosed("the engine is closed") from None
        except BaseException:
            if not running.answer.done():
                self._cancel(running)
            raise
        finally:
            self._calls.discard(running)

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
            running.over.wait()

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


class _LoopCall(Generic[T]):
    """One call, on its way or running. `begin` and `cancel` run on the loop."""

    def __init__(self, call: Callable[[], Awaitable[T]]) -> None:
        self._call = call
        self._task: asyncio.Task[T] | None = None
        self.answer: Future[T] = Future()
        #: Set with the answer, or once the call is cancelled.
        self.over = threading.Event()

    def begin(self) -> None:
        if not self.answer.cancelled():
            self._task = asyncio.get_running_loop().create_task(self._perform())
            self._task.add_done_callback(self._tell)

    def cancel(self) -> None:
        if self._task is not None:
            self._task.cancel()
        else:
            # The waiting thread was interrupted before it had posted `begin`.
            self.answer.cancel()
            self.over.set()

    async def _perform(self) -> T:
        return await self._call()

    def _tell(self, task: asyncio.Task[T]) -> None:
        if task.cancelled():
            self.answer.cancel()
        elif (error := task.exception()) is not None:
            self.answer.set_exception(error)
        else:
            self.answer.set_result(task.result())
        self.over.set()


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


def _run(started: Future[Any], forgotten: _Forgotten, calls: set[_LoopCall[Any]]) -> None:
    """The thread: the loop, and after that the end of what it did not begin."""
    try:
        asyncio.run(_serve(started, forgotten))
    finally:
        for call in list(calls):
            call.answer.cancel()
            call.over.set()


async def _serve(started: Future[Any], forgotten: _Forgotten) -> None:
    loop, stopping = asyncio.get_running_loop(), asyncio.Event()
    forgotten.stop = partial(loop.call_soon_threadsafe, stopping.set)
    started.set_result((loop, stopping))
    # In this order: a finalizer that runs meanwhile finds `stop`, or is found here.
    if not forgotten.is_set:
        await stopping.wait()
    # What still runs is cancelled by `asyncio.run`.
