"""`Runtime`: the source of an engine's time and threads.

A thread of the engine runs a `Worker`, turn by turn. Only the loop around the turns blocks, so a
simulation can run the turns itself, on one thread and with a clock of its own.

Long work without turns, such as a download or the layers of a long prompt, calls `go_on` between
its parts, and so ends soon after nobody wants it any more (`stoppable`).
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Final, Protocol

__all__ = ["Handle", "Runtime", "Threads", "Worker", "current_check", "go_on", "stoppable"]

#: Most seconds of one wait: Python's locks do not accept infinity.
LONGEST_WAIT: Final = 3600.0


class Worker(Protocol):
    """The work of one thread."""

    #: The thread's name.
    name: str

    @property
    def ready(self) -> bool:
        """Whether there is news since the last turn, so that the next turn is due at once."""

    def turn(self) -> float | None:
        """Do what is due. Waits for nothing but what it calls: the model and plugins.

        Returns when the next turn is due without news, in seconds of the runtime's clock; None when
        there is no next one. A time, for a wait would begin late where the thread is held up.
        """

    def wait(self, seconds: float) -> None:
        """Block until there is news, at most `seconds`. Called by a thread between two turns."""


class Handle(Protocol):
    """A started worker."""

    @property
    def ident(self) -> int | None:
        """The thread's number, as `threading.get_ident` gives it."""

    def is_alive(self) -> bool: ...

    def join(self, timeout: float | None = None) -> None:
        """Wait for the worker's end, at most `timeout` seconds."""


class Runtime(Protocol):
    """Time and threads."""

    def clock(self) -> float:
        """Monotonic seconds."""

    def start(self, worker: Worker) -> Handle:
        """Start to run the worker's turns. Raises `RuntimeError` if no thread can be started."""


class Threads:
    """A daemon thread for each worker, and the monotonic clock."""

    clock = staticmethod(time.monotonic)

    def start(self, worker: Worker) -> Handle:
        thread = threading.Thread(
            target=_serve, args=(worker, self.clock), name=worker.name, daemon=True
        )
        thread.start()
        return thread


@contextmanager
def stoppable(check: Callable[[], None]) -> Iterator[None]:
    """Within, `go_on` calls `check`, which raises where nobody wants the work any more. Holds for
    this thread; blocks may be nested, and each is asked."""
    outer = _check.get()

    def both() -> None:
        outer()
        check()

    token = _check.set(check if outer is _nothing else both)
    try:
        yield
    finally:
        _check.reset(token)


def go_on() -> None:
    """Between two parts of work that takes long: raises what the `stoppable` around it does."""
    _check.get()()


def current_check() -> Callable[[], None]:
    """What `go_on` calls here, for work that is prepared within a `stoppable` and done later."""
    return _check.get()


def _nothing() -> None: ...


_check: Final[ContextVar[Callable[[], None]]] = ContextVar("asyncinfer_check", default=_nothing)


def _serve(worker: Worker, clock: Callable[[], float]) -> None:
    while (due := worker.turn()) is not None:
        # A busy worker's next turn is due at 0.0, which saves reading the clock.
        if due > 0.0 and (seconds := due - clock()) > 0.0:
            worker.wait(min(seconds, LONGEST_WAIT))
