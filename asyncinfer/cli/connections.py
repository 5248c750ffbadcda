"""What `asyncinfer serve` sees to beside uvicorn: how many connections there may be, and how long
one that says nothing is kept."""

from __future__ import annotations

import sys
from contextlib import suppress
from typing import TYPE_CHECKING, Any, Final

import anyio

if TYPE_CHECKING:
    from uvicorn import Server

__all__ = ["IDLE_SECONDS", "allow_connections", "close_silent"]

#: Seconds that a connection is kept between two requests. Proxies and clients keep theirs for a
#: minute at most: who closes first sends no request into a connection that is just closed.
IDLE_SECONDS: Final = 75
#: Files, each connection one, that are enough for all requests of an engine.
_FILES: Final = 1 << 16


def allow_connections() -> None:
    """Let this process have more files than the usual 1,024, as far as it may: an engine holds four
    times as many requests, and asyncio answers nobody once it has none left for a connection."""
    if sys.platform == "win32":
        return
    import resource

    now, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = _FILES if most == resource.RLIM_INFINITY else min(_FILES, most)
    if now != resource.RLIM_INFINITY and now < wanted:
        with suppress(OSError, ValueError):
            resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, most))


async def close_silent(server: Server, seconds: float) -> None:
    """Close connections on which no request has begun for `seconds`, at the latest after twice as
    many: uvicorn waits without end for the first byte, and for the end of a request's head."""
    before: dict[Any, Any] = {}
    while True:
        await anyio.sleep(seconds)
        # A cycle is a request and its answer.
        cycles = {each: getattr(each, "cycle", None) for each in server.server_state.connections}
        silent = {
            each: cycle
            for each, cycle in cycles.items()
            if cycle is None or cycle.response_complete
        }
        for each, cycle in before.items():
            if each in silent and silent[each] is cycle:
                each.transport.close()
        before = silent
