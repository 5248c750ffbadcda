"""The errors that a decode thread ends with."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from copy import copy

from asyncinfer.errors import AsyncInferError, EngineClosed, EngineDead, ModelLoadError

__all__ = ["closed", "dead", "no_thread", "not_opened", "orphaned", "without_traceback"]


def closed() -> AsyncInferError:
    return EngineClosed("the engine was closed")


def orphaned() -> AsyncInferError:
    return EngineClosed(
        "the event loop that opened the engine was closed, and nobody could close the engine any "
        "more; open and use it within one run of a loop"
    )


def no_thread(error: RuntimeError) -> EngineDead:
    return EngineDead(f"the engine's threads could not be started: {error}")


def not_opened(error: BaseException) -> Exception:
    """What opening the engine raises: no library's panic, and no exit, ends the opener's task."""
    if isinstance(error, Exception):
        return error
    failed = ModelLoadError(f"{type(error).__name__}: {error}")
    failed.__cause__ = error
    return failed


def without_traceback(error: BaseException) -> BaseException:
    """A copy that keeps no frame alive."""
    copied: BaseException | None = None
    with suppress(Exception):
        # An exception class may be one that cannot be copied.
        copied = copy(error)
    return copied or ModelLoadError(f"{type(error).__name__}: {error}")


def dead(cause: BaseException) -> Callable[[], AsyncInferError]:
    def error() -> AsyncInferError:
        # One exception per stream: tracebacks are written into it where it is raised.
        found = EngineDead(f"the decode loop ended: {type(cause).__name__}: {cause}")
        found.__cause__ = cause
        return found

    return error
