"""Clients of an application, on an event loop in a process of their own."""

from __future__ import annotations

import asyncio
import json
import random
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

__all__ = ["Clients", "Seen", "run_clients"]


@dataclass(frozen=True, slots=True)
class Clients:
    """What the clients do: each streams one answer after the other, and leaves every second one at
    a random event."""

    port: int
    body: Mapping[str, Any]
    streams: int
    seconds: float
    #: Tokens of an answer that is read to its end, and the most events before a client leaves.
    tokens: int
    seed: int


@dataclass(slots=True)
class Seen:
    """What the clients saw."""

    #: Answers that were read to their end, and answers that were left.
    whole: int = 0
    left: int = 0
    events: int = 0
    #: The most streams that were open at once, and the seconds from the first to the last event.
    open: int = 0
    seconds: float = 0.0
    #: What came in place of answers that were neither read to their end nor left.
    broken: list[str] = field(default_factory=list)


def run_clients(clients: Clients) -> Seen:
    """Run the clients until their time is up and their last answers are over."""
    return asyncio.run(_Crowd(clients).run())


class _Crowd:
    def __init__(self, clients: Clients) -> None:
        self._clients = clients
        self._chance = random.Random(clients.seed)
        self._seen = Seen()
        self._open = 0

    async def run(self) -> Seen:
        began = time.monotonic()
        until = began + self._clients.seconds
        await asyncio.gather(*(self._client(until, each) for each in range(self._clients.streams)))
        self._seen.seconds = time.monotonic() - began
        return self._seen

    async def _client(self, until: float, number: int) -> None:
        leaves = number % 2 == 1
        while time.monotonic() < until:
            await self._stream(self._chance.randrange(self._clients.tokens) if leaves else None)
            leaves = not leaves

    async def _stream(self, leave_after: int | None) -> None:
        """Stream one answer over a connection of its own."""
        clients, seen = self._clients, self._seen
        # An answer to be left must not end before that.
        tokens = clients.tokens if leave_after is None else 2 * clients.tokens
        data = json.dumps({**clients.body, "max_tokens": tokens}).encode()
        head = "POST /v1/chat/completions HTTP/1.1\r\nhost: a\r\ncontent-type: application/json\r\n"
        reader, writer = await asyncio.open_connection("127.0.0.1", clients.port)
        self._open += 1
        seen.open = max(seen.open, self._open)
        events = 0
        try:
            writer.write(f"{head}content-length: {len(data)}\r\n\r\n".encode() + data)
            while leave_after is None or events < leave_after:
                line = await reader.readline()
                if line.startswith(b"data: [DONE]"):
                    seen.whole += 1
                    return
                if line.startswith(b'data: {"error"') or not line:
                    seen.broken.append(line.decode()[:200])
                    return
                events += line.startswith(b"data: ")
            seen.left += 1
        finally:
            self._open -= 1
            seen.events += events
            # Aborted, since a client that leaves does not wait for its unsent data.
            writer.transport.abort()
