"""`Lanes`: the worker threads that prepare prompts, and what waits for them."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from threading import Condition
from typing import Final

from asyncinfer.engine.runtime import Handle, Runtime
from asyncinfer.errors import EngineClosed, Overloaded

__all__ = ["Lanes", "Task"]

#: Characters or tokens from which on a prompt may take its worker a large part of a second.
HUGE: Final = 500_000
#: Seconds between two looks of a worker that nobody wakes.
LOOK_EVERY: Final = 3600.0

#: Prepares one prompt. Never raises.
Task = Callable[[], None]


class Lanes:
    """Two workers. One takes the huge prompts first; the other takes none of them, so that however
    many of those there are, an ordinary prompt waits for ordinary ones only."""

    def __init__(self, runtime: Runtime) -> None:
        self._runtime = runtime
        self._tasks = _Tasks()
        self._threads: list[Handle] = []

    def give(self, task: Task, size: int) -> None:
        """Queue a task. Raises `EngineClosed`, and `Overloaded` where no thread can be started."""
        tasks = self._tasks
        with tasks.changed:
            if tasks.closed:
                raise EngineClosed("the engine was closed")
            self._start()
            (tasks.huge if size >= HUGE else tasks.ordinary).append(task)
            tasks.changed.notify_all()

    def drop(self, task: Task) -> bool:
        """Take back a task that nobody has begun; False if there is none."""
        tasks = self._tasks
        with tasks.changed:
            for lane in (tasks.huge, tasks.ordinary):
                if task in lane:
                    lane.remove(task)
                    return True
        return False

    def close(self) -> None:
        """Let the workers end after what they do now. Waits for nothing."""
        tasks = self._tasks
        with tasks.changed:
            tasks.closed = True
            tasks.changed.notify_all()

    @property
    def alive(self) -> bool:
        """Whether a worker runs."""
        return any(thread.is_alive() for thread in self._threads)

    def _start(self) -> None:
        tasks = self._tasks
        kinds = ((tasks.huge, tasks.ordinary), (tasks.ordinary,))
        for lanes in kinds[len(self._threads) :]:
            try:
                self._threads.append(self._runtime.start(_Worker(tasks, lanes)))
            except RuntimeError as error:
                if self._threads:
                    # The first one takes everything: prompts wait longer, and that is all.
                    return
                raise Overloaded(
                    f"no thread can be started to prepare a prompt: {error}"
                ) from error


class _Tasks:
    """What waits."""

    def __init__(self) -> None:
        # Reentrant: the garbage collector may close a coroutine, which drops its task, within.
        self.changed = Condition()
        self.huge: deque[Task] = deque()
        self.ordinary: deque[Task] = deque()
        self.closed = False


class _Worker:
    """Takes from its lanes, the first one first. Ends when the lanes are closed and empty."""

    name = "asyncinfer-intake"

    def __init__(self, tasks: _Tasks, lanes: tuple[deque[Task], ...]) -> None:
        self._tasks = tasks
        self._lanes = lanes

    @property
    def ready(self) -> bool:
        return any(self._lanes) or self._tasks.closed

    def turn(self) -> float | None:
        with self._tasks.changed:
            lane = next(filter(None, self._lanes), None)
            if lane is None:
                return None if self._tasks.closed else LOOK_EVERY
            task = lane.popleft()
        # Not a variable any more when the next one is waited for: it holds a prompt.
        task()
        return 0.0

    def wait(self, seconds: float) -> None:
        with self._tasks.changed:
            if not self.ready:
                self._tasks.changed.wait(seconds)
