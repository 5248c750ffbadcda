"""The errors by which the consumer of a request is told of its end."""

from __future__ import annotations

from asyncinfer.engine.request import Request
from asyncinfer.errors import DeadlineExceeded, EngineClosed, RequestFailed

__all__ = ["closed", "named_failure", "too_late"]


def too_late(request: Request, now: float) -> DeadlineExceeded:
    """What a request's consumer is told when its deadline has passed."""
    return DeadlineExceeded(f"{request.id}: deadline passed after {now - request.submitted:.3f} s")


def closed(request: Request) -> EngineClosed:
    """What a request's consumer is told when a close does not wait for it."""
    return EngineClosed(f"{request.id}: the engine was closed")


def named_failure(request: Request, error: BaseException) -> BaseException:
    """What a request's consumer is told when `error` ends the request: a `RequestFailed` of its
    own, caused by `error`."""
    if isinstance(error, RequestFailed):
        return error
    failed = RequestFailed(f"{request.id}: {str(error) or repr(error)}")
    failed.__cause__ = error
    return failed
