"""`Runtime`: the source of an engine's time and threads.

A thread of the engine runs a `Worker`, turn by turn. Only the loop around the turns blocks, so a
simulation can run the turns itself, on one thread and with a clock of its own.

Long work without turns, such as a download or the layers of a long prompt, calls `check_cancelled`
between its parts. It ends there once nobody wants it any more (`cancellable`).
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from types import BuiltinFunctionType
from typing import Final, Protocol

__all__ = ["Handle", "Runtime", "Threads", "Worker"]
__all__ += ["cancellable", "cancellation_check", "check_cancelled"]

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
        if not isinstance(threading.get_ident, BuiltinFunctionType):
            raise RuntimeError(
                "something runs threads as greenlets, none of which goes on while another "
                "computes; after monkey.patch_all(thread=False, queue=False) gevent does not"
            )
        thread = threading.Thread(
            target=_serve, args=(worker, self.clock), name=worker.name, daemon=True
        )
        thread.start()
        return thread


@contextmanager
def cancellable(check: Callable[[], None]) -> Iterator[None]:
    """Inside the block, `check_cancelled` on this thread calls the cancellation check `check`. It
    raises where nobody wants the work any more. Of nested blocks all checks are called."""
    outer = _check.get()

    def both() -> None:
        outer()
        check()

    token = _check.set(check if outer is _never else both)
    try:
        yield
    finally:
        _check.reset(token)


def check_cancelled() -> None:
    """Between two parts of long work: raise what the check of the `cancellable` around raises."""
    _check.get()()


def cancellation_check() -> Callable[[], None]:
    """The check that `check_cancelled` calls here, for work that is prepared now and done later."""
    return _check.get()


def _never() -> None: ...


_check: Final[ContextVar[Callable[[], None]]] = ContextVar("asyncinfer_check", default=_never)


def _serve(worker: Worker, clock: Callable[[], float]) -> None:
    while (due := worker.turn()) is not None:
        # A busy worker's next turn is due at 0.0, which saves reading the clock.
        if due > 0.0 and (seconds := due - clock()) > 0.0:
            worker.wait(min(seconds, LONGEST_WAIT))
