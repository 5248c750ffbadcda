"""`PromptWorkers`: the threads that prepare long prompts, and the queues in front of them."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from threading import Condition
from typing import Final

from asyncinfer.engine.runtime import Handle, Runtime
from asyncinfer.errors import EngineClosed, Overloaded

__all__ = ["PromptWorkers", "Task"]

#: Characters or tokens from which on a prompt may take its worker a large part of a second.
HUGE: Final = 500_000
#: Seconds between two looks of a worker that nobody wakes.
LOOK_EVERY: Final = 3600.0

#: Prepares one prompt. Never raises.
Task = Callable[[], None]


class PromptWorkers:
    """Two workers. One takes huge prompts first and then ordinary ones. The other takes ordinary
    ones only, so that an ordinary prompt never waits for all the huge ones."""

    def __init__(self, runtime: Runtime) -> None:
        self._runtime = runtime
        self._queues = _Queues()
        self._threads: list[Handle] = []

    def give(self, task: Task, size: int) -> None:
        """Queue a task. Raises `EngineClosed`, and `Overloaded` where no thread can be started."""
        queues = self._queues
        with queues.changed:
            if queues.closed:
                raise EngineClosed("the engine was closed")
            self._start()
            (queues.huge if size >= HUGE else queues.ordinary).append(task)
            queues.changed.notify_all()

    def drop(self, task: Task) -> bool:
        """Take back a task that no worker has begun; False if there is none."""
        queues = self._queues
        with queues.changed:
            for queue in (queues.huge, queues.ordinary):
                if task in queue:
                    queue.remove(task)
                    return True
        return False

    def close(self) -> None:
        """Let the workers end after the tasks that are queued. Waits for nothing."""
        queues = self._queues
        with queues.changed:
            queues.closed = True
            queues.changed.notify_all()

    @property
    def alive(self) -> bool:
        """Whether a worker runs."""
        return any(thread.is_alive() for thread in self._threads)

    def _start(self) -> None:
        queues = self._queues
        kinds = ((queues.huge, queues.ordinary), (queues.ordinary,))
        for served in kinds[len(self._threads) :]:
            try:
                self._threads.append(self._runtime.start(_PromptWorker(queues, served)))
            except RuntimeError as error:
                if self._threads:
                    # The first worker takes every prompt: without the second they wait longer.
                    return
                raise Overloaded(
                    f"no thread can be started to prepare a prompt: {error}"
                ) from error


class _Queues:
    """The tasks that no worker has begun."""

    def __init__(self) -> None:
        # Reentrant: the garbage collector may close a coroutine within, which drops its task.
        self.changed = Condition()
        self.huge: deque[Task] = deque()
        self.ordinary: deque[Task] = deque()
        self.closed = False


class _PromptWorker:
    """Takes tasks from its queues, the first queue first. Ends when they are closed and empty."""

    name = "asyncinfer-intake"

    def __init__(self, queues: _Queues, served: tuple[deque[Task], ...]) -> None:
        self._queues = queues
        self._served = served

    @property
    def ready(self) -> bool:
        return any(self._served) or self._queues.closed

    def turn(self) -> float | None:
        with self._queues.changed:
            queue = next(filter(None, self._served), None)
            if queue is None:
                return None if self._queues.closed else LOOK_EVERY
            task = queue.popleft()
        # A task holds a prompt, and this frame ends before the worker waits for the next one.
        task()
        return 0.0

    def wait(self, seconds: float) -> None:
        with self._queues.changed:
            if not self.ready:
                self._queues.changed.wait(seconds)
