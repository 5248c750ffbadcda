"""Work on requests beside the event loop."""

from __future__ import annotations

from collections.abc import Callable
from threading import Lock
from typing import Final, TypeVar

import anyio
import anyio.to_thread
from anyio.lowlevel import RunVar

from asyncinfer.engine.event_loops import current_bridge

__all__ = ["aside"]

R = TypeVar("R")

#: Requests that are worked on at once. Each thread takes the interpreter from the event loop, and a
#: tokenizer takes hundreds of bytes for each byte of a text.
MOST_ASIDE: Final = 2


async def aside(work: Callable[[], R]) -> R:
    """`work()` on a worker thread, two at most at once. Cancelled, it waits no longer; the work
    counts until it is done, since a thread cannot be stopped."""
    places, bridge, taken = _places(), current_bridge({}), object()
    #: Held by whoever gives the place back.
    settled = Lock()

    def run() -> R | None:
        if not settled.acquire(blocking=False):
            return None
        try:
            return work()
        finally:
            bridge.post(places.release_on_behalf_of, taken)

    await places.acquire_on_behalf_of(taken)
    try:
        # Another limiter, which is left where the wait is.
        result = await anyio.to_thread.run_sync(
            run, abandon_on_cancel=True, limiter=anyio.CapacityLimiter(1)
        )
    except BaseException:
        if settled.acquire(blocking=False):
            # The thread has not begun, and will find that it need not.
            places.release_on_behalf_of(taken)
        raise
    # It is `None` only where nobody waits for it.
    return result  # type: ignore[return-value]


_all_places: Final[RunVar[anyio.CapacityLimiter]] = RunVar("asyncinfer_aside")


def _places() -> anyio.CapacityLimiter:
    """The event loop's."""
    places = _all_places.get(None)
    if places is None:
        places = anyio.CapacityLimiter(MOST_ASIDE)
        _all_places.set(places)
    return places
