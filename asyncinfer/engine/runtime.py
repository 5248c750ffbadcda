"""`Runtime`: where an engine takes its time and its threads from.

What a thread of the engine does is a `Worker`, one turn after another; only the loop around the
turns blocks. So a simulation takes the turns itself, on one thread, with a clock of its own.
"""

from __future__ import annotations

import threading
import time
from typing import Protocol

__all__ = ["Handle", "Runtime", "Threads", "Worker"]


class Worker(Protocol):
    """What one thread does."""

    #: The thread's name.
    name: str

    @property
    def ready(self) -> bool:
        """Whether there is news since the last turn: the next turn is due at once."""

    def turn(self) -> float | None:
        """Do what is due. Waits for nothing but what it calls: the model and plugins.

        Returns seconds until the next turn is due without news, None when there is no next one.
        """

    def wait(self, seconds: float) -> None:
        """Block until there is news, at most `seconds`. Called by a thread between two turns."""


class Handle(Protocol):
    """A worker that was started."""

    @property
    def ident(self) -> int | None:
        """Which thread it is, as `threading.get_ident` has it."""

    def is_alive(self) -> bool: ...

    def join(self, timeout: float | None = None) -> None:
        """Wait for its end, at most `timeout` seconds."""


class Runtime(Protocol):
    """Time and threads."""

    def clock(self) -> float:
        """Monotonic seconds."""

    def start(self, worker: Worker) -> Handle:
        """Let the worker have its turns. Raises `RuntimeError` if no thread can be started."""


class Threads:
    """A daemon thread for each worker, and the monotonic clock."""

    def clock(self) -> float:
        return time.monotonic()

    def start(self, worker: Worker) -> Handle:
        thread = threading.Thread(target=_serve, args=(worker,), name=worker.name, daemon=True)
        thread.start()
        return thread


def _serve(worker: Worker) -> None:
    while (seconds := worker.turn()) is not None:
        if seconds > 0.0:
            worker.wait(seconds)
