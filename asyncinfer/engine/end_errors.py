"""The errors that tell the consumer of a request how it ended."""

from __future__ import annotations

from asyncinfer.engine.request import Request
from asyncinfer.errors import DeadlineExceeded, EngineClosed, RequestFailed

__all__ = ["closed", "named_failure", "too_late"]


def too_late(request: Request, now: float) -> DeadlineExceeded:
    """The error for a request whose deadline has passed."""
    return DeadlineExceeded(f"{request.id}: deadline passed after {now - request.submitted:.3f} s")


def closed(request: Request) -> EngineClosed:
    """The error for a request that a close does not wait for."""
    return EngineClosed(f"{request.id}: the engine was closed")


def named_failure(request: Request, error: BaseException) -> BaseException:
    """The error for a request that `error` ended: a `RequestFailed` of its own, caused by
    `error`."""
    if isinstance(error, RequestFailed):
        return error
    failed = RequestFailed(f"{request.id}: {str(error) or repr(error)}")
    failed.__cause__ = error
    return failed
