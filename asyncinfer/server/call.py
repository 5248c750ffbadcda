"""`Call`: one HTTP request to the application, and the answer to it."""

from __future__ import annotations

import json
import random
import time
from collections.abc import Awaitable, Callable, Iterable, Mapping
from json.encoder import encode_basestring
from math import inf
from typing import TYPE_CHECKING, Any, Final, TypeVar

import anyio

from asyncinfer.bounds import UNREAD_SECONDS
from asyncinfer.server.body import SMALL, Bodies, ClientLeft, beside
from asyncinfer.server.errors import HttpError
from asyncinfer.server.keys import ApiKey

if TYPE_CHECKING:
    from starlette.types import Message, Receive, Scope, Send

__all__ = ["CANCELS", "Call", "headers_of", "json_bytes", "text_bytes"]

T = TypeVar("T")
R = TypeVar("R")

#: An extension of ASGI that our own transport has: it cancels the application of a client that
#: leaves.
CANCELS: Final = "asyncinfer.cancels"

_EVENTS: Final = (
    (b"content-type", b"text/event-stream; charset=utf-8"),
    (b"cache-control", b"no-cache"),
    # Proxies are asked to pass each event on.
    (b"x-accel-buffering", b"no"),
)
_NO_KEY: Final = ApiKey()
#: Ids are no secrets, so that the system is not asked for each.
_IDS: Final = random.Random()
#: `json.dumps` would make an encoder for each call.
_ENCODE: Final = json.JSONEncoder(ensure_ascii=False, separators=(",", ":")).encode
#: Events that wait for others, at most: where an engine is faster than its reader there is always
#: another one.
MOST_HELD: Final = 32
#: Items of a list that is encoded in pieces, and of a piece.
_MANY: Final = 512
_PIECE: Final = 64
#: Characters of a client's own `x-request-id` that is given back.
_MOST_ID: Final = 128


class Call:
    """What a handler reads a request from and answers with: either `json`, once, or any number of
    `event`, sent by `flush`, and then `end`."""

    def __init__(self, scope: Scope, receive: Receive, send: Send) -> None:
        self.headers = headers_of(scope)
        #: Whether the server cancels whoever answers a client that leaves.
        self.cancels = CANCELS in scope.get("extensions", {})
        #: A unique id, which ids of answers are made of.
        self.id = _IDS.randbytes(16).hex()
        given = self.headers.get(b"x-request-id", b"")[:_MOST_ID].decode("latin-1")
        self.request_id = given if given.isprintable() and given else f"req_{self.id}"
        self.path = scope["path"]
        self.method = scope["method"]
        #: The key of the request, set before a handler gets it.
        self.key = _NO_KEY
        self.body: dict[str, Any] = {}
        #: Where in the body each message began that is made of it; empty where it has them itself.
        self.places: list[str] = []
        #: Bytes of the body.
        self._size = 0
        #: Whether the status was sent.
        self._started = False
        #: Events that are not sent yet.
        self._held: list[bytes] = []
        self._receive = receive
        self._send = send
        #: When the message was given to the server that waits for the client, by a monotonic clock.
        self._sending: float | None = None

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
        """Wait until the client leaves, or has taken none of its answer for too long."""
        while True:
            with anyio.move_on_after(UNREAD_SECONDS / 4):
                if (await self._receive())["type"] == "http.disconnect":
                    return
            since = self._sending
            if since is not None and time.monotonic() - since > UNREAD_SECONDS:
                return

    async def json(
        self, content: Any, status: int = 200, headers: Mapping[str, str] | None = None
    ) -> None:
        """Send the whole answer as JSON."""
        await self.data(json_bytes(content), "application/json", status, headers)

    async def made(self, size: int, make: Callable[[], Any]) -> None:
        """`json` of what `make` gives, of which `size` bytes are lists; on a worker thread where
        that is much."""
        body = await beside(size, lambda _: json_bytes(make(), size > SMALL), None)
        await self.data(body, "application/json")

    async def data(
        self,
        body: bytes,
        media_type: str,
        status: int = 200,
        headers: Mapping[str, str] | None = None,
    ) -> None:
        """Send the whole answer: `body` as it is."""
        length = str(len(body)).encode()
        pairs = [(b"content-type", media_type.encode()), (b"content-length", length)]
        for name, text in (headers or {}).items():
            pairs.append((name.encode("latin-1"), text.encode("latin-1")))
        await self._start(status, pairs)
        await self._put({"type": "http.response.body", "body": body})

    @property
    def begun(self) -> bool:
        """Whether the answer has begun, so that an error can be no other answer."""
        return self._started or bool(self._held)

    def event(self, content: Any, name: str | None = None, large: bool = False) -> None:
        """Have one server-sent event sent with the next `flush`, or at the end. `large`: see
        `json_bytes`."""
        begin = b"" if name is None else b"event: %b\n" % name.encode()
        self._held.append(b"%bdata: %b\n\n" % (begin, json_bytes(content, large)))

    def raw_events(self, data: bytes) -> None:
        """`event` for events that are encoded already."""
        self._held.append(data)

    def is_due(self, ready: bool) -> bool:
        """Whether to `flush` now. Some events wait for the next ones that are `ready`: each message
        takes a server and a client its time."""
        return not ready or len(self._held) >= MOST_HELD

    def flush(self) -> Awaitable[None]:
        """Send the events so far in one message. The first ones start the answer."""
        return self._send_held(more=True)

    async def end(self, data: bytes = b"") -> None:
        """End the answer with the events that are not sent, and `data`, encoded already."""
        self._held.append(data)
        await self._send_held(more=False)

    async def _send_held(self, *, more: bool) -> None:
        if more and not self._held:
            return
        data = b"".join(self._held)
        self._held.clear()
        if not self._started:
            await self._start(200, _EVENTS)
        await self._put({"type": "http.response.body", "body": data, "more_body": more})

    async def _start(self, status: int, headers: Iterable[tuple[bytes, bytes]]) -> None:
        self._started = True
        own = self.request_id.encode("latin-1")
        pairs = [*headers, (b"x-request-id", own), (b"request-id", own)]
        message: Message = {"type": "http.response.start", "status": status, "headers": pairs}
        await self._put(message)

    async def _put(self, message: Message) -> None:
        self._sending = time.monotonic()
        try:
            await self._send(message)
        except OSError:
            # Servers of ASGI 2.4 raise this once the client has left.
            raise ClientLeft from None
        finally:
            self._sending = None

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


def json_bytes(content: Any, large: bool = False) -> bytes:
    """`large`: in pieces, so that other threads get the GIL; the encoder in C holds it to its
    end."""
    text = _in_pieces(content) if large else _ENCODE(content)
    # A client's own text may have a lone surrogate, which JSON escapes as Python does.
    return text.encode(errors="backslashreplace")


def _in_pieces(content: Any) -> str:
    if isinstance(content, dict):
        named = (f"{_ENCODE(name)}:{_in_pieces(each)}" for name, each in content.items())
        return f"{{{','.join(named)}}}"
    if not isinstance(content, list):
        return _ENCODE(content)
    if len(content) <= _MANY:
        return f"[{','.join(map(_in_pieces, content))}]"
    starts = range(0, len(content), _PIECE)
    return f"[{','.join(_ENCODE(content[at : at + _PIECE])[1:-1] for at in starts)}]"


def text_bytes(text: str) -> bytes:
    """`json_bytes` of a text, in half the time."""
    return encode_basestring(text).encode(errors="backslashreplace")
