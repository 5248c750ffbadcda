"""`offload` runs long work on requests in worker threads, beside the event loop."""

from __future__ import annotations

from collections.abc import Callable
from threading import Lock
from typing import Final, TypeVar

import anyio
import anyio.to_thread
from anyio.lowlevel import RunVar

from asyncinfer.engine.event_loops import current_bridge

__all__ = ["offload"]

R = TypeVar("R")

#: Threads that work at once. Each takes the GIL from the event loop, and a tokenizer takes hundreds
#: of bytes of memory for each byte of a text.
MOST_OFFLOADED: Final = 2


async def offload(work: Callable[[], R]) -> R:
    """`work()` on a worker thread, two at most at once. A cancelled call stops waiting; its thread,
    which cannot be stopped, counts until it is done."""
    limiter, bridge, taken = _limiter(), current_bridge({}), object()
    #: Acquired by whoever returns the token to the limiter.
    settled = Lock()

    def run() -> R | None:
        if not settled.acquire(blocking=False):
            return None
        try:
            return work()
        finally:
            bridge.post(limiter.release_on_behalf_of, taken)

    await limiter.acquire_on_behalf_of(taken)
    try:
        # A limiter of its own, since anyio would give this one back when the wait is cancelled.
        result = await anyio.to_thread.run_sync(
            run, abandon_on_cancel=True, limiter=anyio.CapacityLimiter(1)
        )
    except BaseException:
        if settled.acquire(blocking=False):
            # The thread has not begun, and finds that nothing is left to do.
            limiter.release_on_behalf_of(taken)
        raise
    # The result is None only where nobody waits for it.
    return result  # type: ignore[return-value]


_LIMITERS: Final[RunVar[anyio.CapacityLimiter]] = RunVar("asyncinfer_offload")


def _limiter() -> anyio.CapacityLimiter:
    """The limiter of the running event loop."""
    limiter = _LIMITERS.get(None)
    if limiter is None:
        limiter = anyio.CapacityLimiter(MOST_OFFLOADED)
        _LIMITERS.set(limiter)
    return limiter
