"""`within`: a call of somebody else's code that has to end in time."""

from __future__ import annotations

import sys
import threading
import traceback
from collections.abc import Callable
from typing import Any, Generic, TypeVar

__all__ = ["Call", "NotInTime", "within"]

T = TypeVar("T")


class NotInTime(TimeoutError):
    """The call has not returned. `stack` is where it was, the innermost frame last."""

    def __init__(self, seconds: float, stack: str) -> None:
        self.stack = stack
        super().__init__(f"has not returned after {seconds:g} s; it is at\n{stack}")


class Call(Generic[T]):
    """`function(*args)` on a thread of its own. A thread cannot be ended from outside: one that
    nobody waits for any more is left behind, as a daemon.

    `RuntimeError` where the system starts no thread.
    """

    def __init__(self, function: Callable[..., T], *args: Any) -> None:
        self._function = function
        self._args = args
        self._result: list[T] = []
        self._error: BaseException | None = None
        self._thread = threading.Thread(target=self._run, name="asyncinfer-call", daemon=True)
        self._thread.start()

    def wait(self, seconds: float) -> bool:
        """Whether it ends within `seconds`."""
        self._thread.join(seconds)
        return not self._thread.is_alive()

    def outcome(self) -> T:
        """What it returned; raises what it raised. It has ended."""
        if self._error is not None:
            raise self._error
        return self._result[0]

    def stack(self) -> str:
        """Where it is; empty once it has ended."""
        frame = sys._current_frames().get(self._thread.ident or 0)
        return "" if frame is None else "".join(traceback.format_stack(frame)).rstrip()

    def _run(self) -> None:
        try:
            self._result.append(self._function(*self._args))
        except BaseException as error:
            self._error = error


def within(seconds: float, function: Callable[..., T], *args: Any) -> T:
    """What `function(*args)` returns or raises; `NotInTime` after `seconds`. See `Call`."""
    call = Call(function, *args)
    if not call.wait(seconds):
        raise NotInTime(seconds, call.stack())
    return call.outcome()
