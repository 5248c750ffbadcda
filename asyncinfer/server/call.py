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
from asyncinfer.server.body import SMALL, Bodies, ClientLeft, offload_large
from asyncinfer.server.errors import HttpError
from asyncinfer.server.keys import ApiKey

if TYPE_CHECKING:
    from starlette.types import Message, Receive, Scope, Send

__all__ = ["CANCELS", "Call", "headers_of", "json_bytes", "text_bytes"]

T = TypeVar("T")
R = TypeVar("R")

#: An extension of ASGI, of our own in-process transport: the server cancels the application when a
#: client leaves.
CANCELS: Final = "asyncinfer.cancels"

_EVENTS: Final = (
    (b"content-type", b"text/event-stream; charset=utf-8"),
    (b"cache-control", b"no-cache"),
    # Proxies are asked to pass each event on.
    (b"x-accel-buffering", b"no"),
)
_NO_KEY: Final = ApiKey()
#: Ids are no secrets, so a fast generator will do.
_IDS: Final = random.Random()
#: Kept, since `json.dumps` makes an encoder for each call.
_ENCODE: Final = json.JSONEncoder(ensure_ascii=False, separators=(",", ":")).encode
#: The most events that wait for the next one: if the engine is faster than its reader, a next one
#: is always ready.
MOST_HELD: Final = 32
#: Items of a list that is encoded in pieces, and of a piece.
_MANY: Final = 512
_PIECE: Final = 64
#: Characters of a client's own `x-request-id` that is given back.
_MOST_ID: Final = 128


class Call:
    """One request and its answer. A handler reads from it, and answers either with `json`, once, or
    with any number of `event`, sent by `flush`, and then `end`."""

    def __init__(self, scope: Scope, receive: Receive, send: Send) -> None:
        self.headers = headers_of(scope)
        #: Whether the server cancels the application when a client leaves.
        self.cancels = CANCELS in scope.get("extensions", {})
        #: A unique id, from which the ids of answers are made.
        self.id = _IDS.randbytes(16).hex()
        given = self.headers.get(b"x-request-id", b"")[:_MOST_ID].decode("latin-1")
        self.request_id = given if given.isprintable() and given else f"req_{self.id}"
        self.path = scope["path"]
        self.method = scope["method"]
        #: The request's key, set before a handler runs.
        self.key = _NO_KEY
        self.body: dict[str, Any] = {}
        #: Where in the body each message comes from; empty where the body has messages itself.
        self.places: list[str] = []
        #: Bytes of the body.
        self._size = 0
        #: Whether the status line was sent.
        self.started = False
        #: Encoded events that were not sent yet.
        self._held: list[bytes] = []
        #: Whether an answer can have the connection closed, which HTTP/2 has no header for.
        self._closes = scope.get("http_version", "1.1").startswith("1")
        self._receive = receive
        self._send = send
        #: When the message that is being sent was given to the server, by a monotonic clock.
        self._sending: float | None = None

    async def read(self, bodies: Bodies) -> None:
        """Read the body. Raises as `Bodies.read` does."""
        self._check_head(bodies)
        # A request from this process arrives as a whole.
        limit = {"seconds": inf} if self.cancels else {}
        try:
            self.body, self._size = await bodies.read(self._receive, **limit)
        except HttpError as error:
            if error.status == 408 and self._closes:
                # Or a server keeps the connection, for the rest of the body that does not come.
                error.headers["connection"] = "close"
            raise

    async def offload(self, work: Callable[[T], R], argument: T) -> R:
        """`work(argument)`, which takes the body or a part of it; on a worker thread if the body is
        large."""
        return await offload_large(self._size, work, argument)

    async def gone(self) -> None:
        """Wait until the client leaves, or has read none of its answer for too long."""
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
        body = await offload_large(size, lambda _: json_bytes(make(), size > SMALL), None)
        await self.data(body, "application/json")

    async def data(
        self,
        body: bytes,
        media_type: str,
        status: int = 200,
        headers: Mapping[str, str] | None = None,
    ) -> None:
        """Send the whole answer, with `body` unchanged."""
        length = str(len(body)).encode()
        pairs = [(b"content-type", media_type.encode()), (b"content-length", length)]
        for name, text in (headers or {}).items():
            pairs.append((name.encode("latin-1"), text.encode("latin-1")))
        await self._start(status, pairs)
        await self._put({"type": "http.response.body", "body": body})

    @property
    def begun(self) -> bool:
        """Whether the answer has begun, so that an error can no longer replace it."""
        return self.started or bool(self._held)

    def event(self, content: Any, name: str | None = None, large: bool = False) -> None:
        """Have one server-sent event sent with the next `flush`, or at the end. `large`: see
        `json_bytes`."""
        begin = b"" if name is None else b"event: %b\n" % name.encode()
        self._held.append(b"%bdata: %b\n\n" % (begin, json_bytes(content, large)))

    def raw_events(self, data: bytes) -> None:
        """`event` for events that are encoded already."""
        self._held.append(data)

    def is_due(self, ready: bool) -> bool:
        """Whether to `flush` now. Events wait for others that are `ready`, since each message costs
        a server and a client time."""
        return not ready or len(self._held) >= MOST_HELD

    def flush(self) -> Awaitable[None]:
        """Send the queued events in one message. The first message starts the answer."""
        return self._send_held(more=True)

    async def end(self, data: bytes = b"") -> None:
        """End the answer with the queued events and `data`, which is encoded already."""
        self._held.append(data)
        await self._send_held(more=False)

    async def _send_held(self, *, more: bool) -> None:
        if more and not self._held:
            return
        data = b"".join(self._held)
        self._held.clear()
        if not self.started:
            await self._start(200, _EVENTS)
        await self._put({"type": "http.response.body", "body": data, "more_body": more})

    async def _start(self, status: int, headers: Iterable[tuple[bytes, bytes]]) -> None:
        self.started = True
        own = self.request_id.encode("latin-1")
        pairs = [*headers, (b"x-request-id", own), (b"request-id", own)]
        message: Message = {"type": "http.response.start", "status": status, "headers": pairs}
        await self._put(message)

    async def _put(self, message: Message) -> None:
        self._sending = time.monotonic()
        try:
            await self._send(message)
        except OSError:
            # ASGI 2.4 servers raise this after the client has left.
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
        coding = self.headers.get(b"content-encoding", b"").strip().lower()
        if coding not in (b"", b"identity"):
            told = f"content-encoding={coding.decode('latin-1')!r}: must be identity"
            raise HttpError(415, "invalid_request_error", told)


def headers_of(scope: Scope) -> dict[bytes, bytes]:
    """Header values by name, which ASGI has in lower case."""
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
