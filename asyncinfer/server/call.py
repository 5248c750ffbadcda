"""`Call`: one HTTP request to the application, and the answer to it."""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Mapping
from math import inf
from typing import TYPE_CHECKING, Any, Final, TypeVar

from asyncinfer.server.body import Bodies, ClientLeft, beside
from asyncinfer.server.errors import HttpError
from asyncinfer.server.keys import ApiKey

if TYPE_CHECKING:
    from starlette.types import Message, Receive, Scope, Send

__all__ = ["CANCELS", "Call", "headers_of", "json_bytes"]

T = TypeVar("T")
R = TypeVar("R")

#: An extension of ASGI that our own transport has: it cancels the application of a client that
#: leaves.
CANCELS: Final = "asyncinfer.cancels"

_EVENTS: Final = {"content-type": "text/event-stream; charset=utf-8", "cache-control": "no-cache"}
#: Proxies are asked to pass each event on.
_UNBUFFERED: Final = {"x-accel-buffering": "no"}
_NO_KEY: Final = ApiKey()
#: Ids are no secrets, so that the system is not asked for each.
_IDS: Final = random.Random()
#: `json.dumps` would make an encoder for each call.
_ENCODE: Final = json.JSONEncoder(ensure_ascii=False, separators=(",", ":")).encode
#: Characters of a client's own `x-request-id` that is given back.
_MOST_ID: Final = 128


class Call:
    """What a handler reads a request from and answers with: either `json`, once, or any number of
    `event` and then `end`."""

    def __init__(self, scope: Scope, receive: Receive, send: Send) -> None:
        self.headers = headers_of(scope)
        #: Whether the server cancels whoever answers a client that leaves.
        self.cancels = CANCELS in scope.get("extensions", {})
        #: A unique id, which ids of answers are made of.
        self.id = f"{_IDS.getrandbits(128):032x}"
        given = self.headers.get(b"x-request-id", b"")[:_MOST_ID].decode("latin-1")
        self.request_id = given if given.isprintable() and given else f"req_{self.id}"
        self.path = scope["path"]
        self.method = scope["method"]
        #: The key of the request, set before a handler gets it.
        self.key = _NO_KEY
        self.body: dict[str, Any] = {}
        #: Bytes of the body.
        self._size = 0
        #: Whether the status was sent.
        self.started = False
        self._receive = receive
        self._send = send

    async def read(self, bodies: Bodies) -> None:
        """Read the body. Raises as `Bodies.read` does."""
        self._check_head(bodies)
        # What comes from this process is here as a whole.
        limit = {"seconds": inf} if self.cancels else {}
        self.body, self._size = await bodies.read(self._receive, **limit)

    async def beside(self, work: Callable[[T], R], argument: T) -> R:
        """`work(argument)`, which is about what the body has; on a worker thread where that is
        much."""
        return await beside(self._size, work, argument)

    async def gone(self) -> None:
        """Wait until the client leaves."""
        while (await self._receive())["type"] != "http.disconnect":
            pass

    async def json(
        self, content: Any, status: int = 200, headers: Mapping[str, str] | None = None
    ) -> None:
        """Send the whole answer as JSON."""
        await self.data(json_bytes(content), "application/json", status, headers)

    async def data(
        self,
        body: bytes,
        media_type: str,
        status: int = 200,
        headers: Mapping[str, str] | None = None,
    ) -> None:
        """Send the whole answer: `body` as it is."""
        length = {"content-type": media_type, "content-length": str(len(body))}
        await self._start(status, {**length, **(headers or {})})
        await self._put({"type": "http.response.body", "body": body})

    async def event(self, content: Any, name: str | None = None) -> None:
        """Send one server-sent event; the first one starts the answer."""
        data = b"data: " + json_bytes(content) + b"\n\n"
        await self.raw_event(data if name is None else f"event: {name}\n".encode() + data)

    async def choice_event(self, opening: bytes, choice: Any) -> None:
        """Send an event of OpenAI's protocols with one choice. `opening`: the JSON of its other
        fields without the last brace, which is the same in every event of a stream."""
        await self.raw_event(b'data: %b,"choices":[%b]}\n\n' % (opening, json_bytes(choice)))

    async def raw_event(self, data: bytes) -> None:
        """Send an event that is encoded already."""
        if not self.started:
            await self._start(200, {**_EVENTS, **_UNBUFFERED})
        await self._put({"type": "http.response.body", "body": data, "more_body": True})

    async def end(self) -> None:
        """End the answer after its last event."""
        await self._put({"type": "http.response.body", "body": b""})

    async def _start(self, status: int, headers: Mapping[str, str]) -> None:
        self.started = True
        named = {**headers, "x-request-id": self.request_id, "request-id": self.request_id}
        pairs = [(name.encode("latin-1"), text.encode("latin-1")) for name, text in named.items()]
        message: Message = {"type": "http.response.start", "status": status, "headers": pairs}
        await self._put(message)

    async def _put(self, message: Message) -> None:
        try:
            await self._send(message)
        except OSError:
            # Servers of ASGI 2.4 raise this once the client has left.
            raise ClientLeft from None

    def _check_head(self, bodies: Bodies) -> None:
        bodies.check_length(self.headers.get(b"content-length", b"0"))
        media_type = self.headers.get(b"content-type", b"").partition(b";")[0].strip().lower()
        if media_type != b"application/json":
            # Browsers let pages of any origin post some other types without a preflight.
            raise HttpError(
                415,
                "invalid_request_error",
                f"content-type={media_type.decode('latin-1')!r}: must be application/json",
            )


def headers_of(scope: Scope) -> dict[bytes, bytes]:
    """Values by name, which ASGI has in small letters."""
    return dict(scope["headers"])


def json_bytes(content: Any) -> bytes:
    return _ENCODE(content).encode()
