"""`Outbox`: calls of replicas that nobody waits for."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from contextlib import suppress
from typing import Any

from asyncinfer.errors import AsyncInferError
from asyncinfer.remote.link import Link

__all__ = ["Outbox"]


class Outbox:
    """Calls methods of replicas whose results nobody needs, each in a task."""

    def __init__(self) -> None:
        self._loop: asyncio.AbstractEventLoop | None = None
        self._sending: set[asyncio.Task[None]] = set()

    def opened(self) -> None:
        """Note the event loop that the replicas belong to: the one that runs."""
        self._loop = asyncio.get_running_loop()

    def tell(
        self, link: Link | None, timeout: float, method: str, *args: Any
    ) -> asyncio.Task[None]:
        """Call a method. The task need not be awaited, and raises nothing. It does nothing if the
        replica is gone."""
        task = asyncio.ensure_future(_told(link, timeout, method, *args))
        self._sending.add(task)
        task.add_done_callback(self._sending.discard)
        return task

    def soon(self, call: Callable[..., object], *args: Any) -> None:
        """Have the event loop call this. Any thread."""
        if self._loop is not None and not self._loop.is_closed():
            self._loop.call_soon_threadsafe(call, *args)

    async def emptied(self) -> None:
        """Wait until all calls are over."""
        if self._sending:
            await asyncio.wait(self._sending)


async def _told(link: Link | None, timeout: float, method: str, *args: Any) -> None:
    with suppress(AsyncInferError, TimeoutError):
        if link is not None:
            async with asyncio.timeout(timeout):
                await link.call(method, *args)
