"""`call_within`: calls a plugin's code, and gives up waiting after some time."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any, Generic, TypeVar

from asyncinfer.plugins.supervision import stack_of

__all__ = ["CallTimeout", "ThreadCall", "call_within"]

T = TypeVar("T")


class CallTimeout(TimeoutError):
    """The call has not returned. `stack` is its stack then, the innermost frame last."""

    def __init__(self, seconds: float, stack: str) -> None:
        self.stack = stack
        super().__init__(f"has not returned after {seconds:g} s; it is at\n{stack}")


class ThreadCall(Generic[T]):
    """`function(*args)` on a daemon thread of its own. A thread cannot be ended from outside, so
    the thread of a call that is given up is left behind.

    Raises `RuntimeError` if the system cannot start a thread.
    """

    def __init__(self, function: Callable[..., T], *args: Any) -> None:
        self._function = function
        self._args = args
        self._result: list[T] = []
        self._error: BaseException | None = None
        self._thread = threading.Thread(target=self._run, name="asyncinfer-call", daemon=True)
        self._thread.start()

    def wait(self, seconds: float) -> bool:
        """Wait for the call. Returns whether it ended within `seconds`."""
        self._thread.join(seconds)
        return not self._thread.is_alive()

    def outcome(self) -> T:
        """What the call returned; raises what it raised. Only after it has ended."""
        if self._error is not None:
            raise self._error
        return self._result[0]

    def stack(self) -> str:
        """The thread's stack; empty once the call has ended."""
        return stack_of(self._thread.ident or 0)

    def _run(self) -> None:
        try:
            self._result.append(self._function(*self._args))
        except BaseException as error:
            self._error = error


def call_within(seconds: float, function: Callable[..., T], *args: Any) -> T:
    """What `function(*args)` returns or raises; `CallTimeout` after `seconds`. See `ThreadCall`."""
    call = ThreadCall(function, *args)
    if not call.wait(seconds):
        raise CallTimeout(seconds, call.stack())
    return call.outcome()
