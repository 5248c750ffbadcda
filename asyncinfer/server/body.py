"""The body of a request: read within bounds, and parsed without holding up the event loop."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from json import decoder, scanner
from math import inf, isinf
from typing import TYPE_CHECKING, Any, Final, TypeVar

import anyio

from asyncinfer.bounds import BODY_SECONDS, MAX_BODY_CONTAINERS
from asyncinfer.errors import InvalidRequest, Size
from asyncinfer.server.errors import HttpError, overloaded
from asyncinfer.server.offload import offload

if TYPE_CHECKING:
    from starlette.types import Receive

__all__ = ["SMALL", "Bodies", "ClientLeft", "NoNumber", "offload_large", "parsed"]

T = TypeVar("T")
R = TypeVar("R")

#: Bytes of the largest body that is parsed on the event loop, in four milliseconds at most.
SMALL: Final = 1 << 15
#: Bytes of all bodies that are being read or parsed, in bodies of the largest size.
MOST_READ: Final = 32

#: Numbers of a list, in a text of some milliseconds; fewer characters are not worth it.
_NUMBERS: Final = re.compile(r"[-+.,0-9eE \t\n\r]{1,32768}")
_FEW: Final = 64
#: Characters of a number that a message shows.
_SHOWN: Final = 80


class NoNumber(ValueError):
    """A text has a number that JSON has not, or that is no float: Python reads it as infinite."""


class ClientLeft(Exception):
    """The client has left, so that nobody waits for the answer."""


class Bodies:
    """Reads the bodies of an application's requests, JSON objects.

    Args:
        most: bytes of one.
    """

    def __init__(self, most: int) -> None:
        self.most = most
        #: Bytes of those that are being read or parsed.
        self.held = 0

    async def read(
        self, receive: Receive, seconds: float | None = None
    ) -> tuple[dict[str, Any], int]:
        """Read a body, which has `seconds` to arrive (None takes `BODY_SECONDS`), and return it
        with its size in bytes. Raises
        `HttpError`, `InvalidRequest`, and `ClientLeft` where the client leaves before its end."""
        data = bytearray()
        seconds = BODY_SECONDS if seconds is None else seconds
        try:
            with _limit(seconds) as limit:
                more = True
                while more:
                    message = await receive()
                    if message["type"] == "http.disconnect":
                        raise ClientLeft
                    part = message.get("body", b"")
                    self._take(data, part)
                    more = message.get("more_body", False)
                # Charged until the body is parsed, which takes more memory than its bytes.
                if limit is not None:
                    limit.deadline = inf
                return await offload_large(len(data), _object, data), len(data)
        finally:
            self.held -= len(data)
        raise HttpError(408, "timeout_error", f"the body did not arrive within {seconds:.0f} s")

    def check_length(self, length: bytes) -> None:
        """Raise `HttpError` for a body that is announced too large."""
        if length.isdigit() and int(length[:20]) > self.most:
            raise self._too_large()

    def _take(self, data: bytearray, part: bytes) -> None:
        if len(data) + len(part) > self.most:
            raise self._too_large()
        if self.held + len(part) > MOST_READ * self.most:
            raise overloaded(f"{self.held} bytes of requests are being read")
        data += part
        self.held += len(part)

    def _too_large(self) -> HttpError:
        return HttpError(413, "request_too_large", f"the body must have at most {self.most} bytes")


class _GivingWay(json.JSONDecoder):
    """Parses in Python, so that other threads get the GIL every few milliseconds. The parser in C
    holds it to the end, which takes a second for eight megabytes of `[],[],[]`. Strings are still
    parsed in C, which takes 50 ms at most."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self._containers = 0
        self.parse_object = self._counted(decoder.JSONObject)  # type: ignore[attr-defined]
        self.parse_array = self._counted(_array)
        self.scan_once = scanner.py_make_scanner(self)  # type: ignore[attr-defined]

    def _counted(self, parse: Callable[..., Any]) -> Callable[..., Any]:
        """`parse` with a bound on calls: an object or array costs microseconds wherever it goes."""

        def counted(*given: Any) -> Any:
            self._containers += 1
            if self._containers > MAX_BODY_CONTAINERS:
                raise ValueError(f"it has more than {MAX_BODY_CONTAINERS} objects and arrays")
            return parse(*given)

        return counted


def _array(place: tuple[str, int], scan_once: Callable[..., Any]) -> tuple[list[Any], int]:
    """The list that begins at a place in a text, and the place where it ends. C code parses its
    numbers, some thousands at a time: Python takes eight seconds for four million token ids."""
    text, at = place
    numbers: list[Any] = []
    while (found := _NUMBERS.match(text, at)) is not None:
        comma = text.rfind(",", at, found.end())
        if comma < 0 or comma - at < _FEW:
            break
        numbers += _IN_C.decode(f"[{text[at:comma]}]")
        at = comma + 1
    rest, end = decoder.JSONArray((text, at), scan_once)  # type: ignore[attr-defined]
    if numbers and not rest:
        raise json.JSONDecodeError("Expecting value", text, at)
    return numbers + rest, end


async def offload_large(size: int, work: Callable[[T], R], argument: T) -> R:
    """`work(argument)`, which takes `size` bytes of a request; on a worker thread if these are
    many."""
    if size <= SMALL:
        return work(argument)
    return await offload(partial(work, argument))


def parsed(text: str) -> Any:
    """The value of a JSON text. Raises `ValueError` and `RecursionError`."""
    if len(text) > SMALL:
        return _GivingWay(parse_constant=_no_number, parse_float=_finite).decode(text)
    # `decode` skips spaces with a regular expression, which takes as long as parsing does.
    text = text.strip(" \t\n\r")
    value, end = _SMALL_TEXT.raw_decode(text)
    if end < len(text):
        raise json.JSONDecodeError("Extra data", text, end)
    return value


def _limit(seconds: float) -> AbstractContextManager[anyio.CancelScope | None]:
    return nullcontext() if seconds == inf else anyio.move_on_after(seconds)


def _object(data: bytearray) -> dict[str, Any]:
    try:
        # A text that begins with these two bytes is UTF-8.
        encoding = "utf-8" if data.startswith(b'{"') else json.detect_encoding(data)
        body = parsed(data.decode(encoding))
    except (ValueError, RecursionError) as error:
        why = str(error) or type(error).__name__
        raise HttpError(
            400, "invalid_request_error", f"the body cannot be read as JSON: {why}"
        ) from None
    if not isinstance(body, dict):
        raise InvalidRequest("body", Size(type(body).__name__), "must be a JSON object")
    # Clients send null for what is not set.
    return {name: value for name, value in body.items() if value is not None}


def _no_number(text: str) -> None:
    raise NoNumber(f"{text} is no JSON number")


def _finite(text: str) -> float:
    number = float(text)
    if isinf(number):
        raise NoNumber(f"{text[:_SHOWN]} is too large for a number")
    return number


_SMALL_TEXT: Final = json.JSONDecoder(parse_constant=_no_number, parse_float=_finite)
_IN_C: Final = json.JSONDecoder(parse_float=_finite)
