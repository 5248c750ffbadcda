"""`weak_call`: a call of an object that need not exist for it."""

from __future__ import annotations

import weakref
from collections.abc import Callable

__all__ = ["weak_call"]


def weak_call(method: Callable[[], None]) -> Callable[[], None]:
    """What calls a bound method, and does nothing once its object is gone. Threads that compute a
    step keep its decoder, which would keep all that it calls."""
    held = weakref.WeakMethod(method)

    def call() -> None:
        if (found := held()) is not None:
            found()

    return call
