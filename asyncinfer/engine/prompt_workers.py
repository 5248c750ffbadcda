"""`PromptWorkers`: the threads that prepare long prompts, and the queues in front of them."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from contextlib import suppress
from math import inf
from queue import Empty, SimpleQueue
from threading import RLock
from typing import Final

from asyncinfer.engine.heap import trim_heap
from asyncinfer.errors import EngineClosed, Overloaded
from asyncinfer.runtime import Handle, Runtime

__all__ = ["PromptWorkers", "Task"]

#: Characters or tokens from which on a prompt may take its worker a large part of a second.
HUGE: Final = 500_000

#: Prepares one prompt. Never raises.
Task = Callable[[], None]


class PromptWorkers:
    """Two workers. One takes huge prompts first and then ordinary ones. The other takes ordinary
    ones only, so that an ordinary prompt never waits for all the huge ones."""

    def __init__(self, runtime: Runtime) -> None:
        self._runtime = runtime
        self._queues = _Queues()
        self._threads: list[Handle] = []
        self._starting = RLock()

    def give(self, task: Task, size: int) -> None:
        """Queue a task. Raises `EngineClosed`, and `Overloaded` where no thread can be started."""
        queues = self._queues
        if queues.is_closed():
            raise EngineClosed("the engine was closed")
        with self._starting:
            self.start()
        (queues.huge if size >= HUGE else queues.ordinary).append(task)
        queues.announce()
        # Workers that end meanwhile leave it there.
        if queues.is_closed() and self.drop(task):
            raise EngineClosed("the engine was closed")

    def drop(self, task: Task) -> bool:
        """Take back a task that no worker has begun; False if there is none."""
        for queue in (self._queues.huge, self._queues.ordinary):
            with suppress(ValueError):
                queue.remove(task)
                return True
        return False

    def close(self) -> None:
        """Let the workers end after the tasks that are queued. Waits for nothing and takes no lock,
        so that a finalizer may call it."""
        self._queues.closed = True
        self._queues.announce()

    @property
    def alive(self) -> bool:
        """Whether a worker runs."""
        return any(thread.is_alive() for thread in self._threads)

    def start(self) -> None:
        """Start the workers that do not run yet. `give` calls it under the lock."""
        queues = self._queues
        kinds = ((queues.huge, queues.ordinary), (queues.ordinary,))
        for index, served in enumerate(kinds[len(self._threads) :], len(self._threads)):
            try:
                worker = _PromptWorker(queues, served, queues.news[index])
                self._threads.append(self._runtime.start(worker))
            except RuntimeError as error:
                if self._threads:
                    # The first worker takes prompts of all sizes, so one worker will do.
                    return
                raise Overloaded(
                    f"no thread can be started to prepare a prompt: {error}"
                ) from error


class _Queues:
    """The tasks that no worker has begun. What is done to a queue is one call of `deque`, which
    needs no lock."""

    def __init__(self) -> None:
        self.huge: deque[Task] = deque()
        self.ordinary: deque[Task] = deque()
        self.closed = False
        #: One for each worker: an entry wakes it.
        self.news: tuple[SimpleQueue[None], ...] = (SimpleQueue(), SimpleQueue())

    def is_closed(self) -> bool:
        return self.closed

    def announce(self) -> None:
        """Wake the workers. A busy worker looks at the queues again before it sleeps."""
        for news in self.news:
            if news.empty():
                news.put(None)


class _PromptWorker:
    """Takes tasks from its queues, the first queue first. Ends when they are closed and empty."""

    name = "asyncinfer-intake"

    def __init__(
        self, queues: _Queues, served: tuple[deque[Task], ...], news: SimpleQueue[None]
    ) -> None:
        self._queues = queues
        self._served = served
        self._news = news

    @property
    def ready(self) -> bool:
        return any(self._served) or self._queues.closed

    def turn(self) -> float | None:
        # In this order: what was queued before the close is seen.
        closed = self._queues.closed
        for queue in self._served:
            with suppress(IndexError):
                task = queue.popleft()
                break
        else:
            return None if closed else inf
        # A task holds a prompt, and this frame ends before the worker waits for the next one.
        task()
        if queue is self._queues.huge and not queue:
            # Tokenising a megabyte takes 130 MiB in millions of pieces, which malloc would not
            # return.
            trim_heap()
        return 0.0

    def wait(self, seconds: float) -> None:
        if not self.ready:
            with suppress(Empty):
                self._news.get(timeout=seconds)
