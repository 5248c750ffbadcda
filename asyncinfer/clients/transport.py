"""Transports for httpx and httpx2 by which a client talks to an ASGI application in this process.

Those that come with the libraries run the application to its end before the answer begins. These
give the answer when its status is there, pass each part on, and cancel the application when the
answer is closed or its time is up.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import suppress
from types import ModuleType
from typing import Any, TypeVar

from asyncinfer.clients.exchange import App, Broken, Exchange
from asyncinfer.engine.event_loop_thread import EventLoopThread
from asyncinfer.errors import EngineClosed
from asyncinfer.server.call import CANCELS

__all__ = ["async_transport", "sync_transport"]

T = TypeVar("T")


def async_transport(httpx: ModuleType, app: App) -> Any:
    """An `AsyncBaseTransport` of this library, `httpx` or `httpx2`."""

    class Body(httpx.AsyncByteStream):  # type: ignore[name-defined,misc]
        def __init__(self, exchange: Exchange, limits: _Limits) -> None:
            self._exchange = exchange
            self._limits = limits

        def __aiter__(self) -> AsyncIterator[bytes]:
            return self

        async def __anext__(self) -> bytes:
            if (part := await self._limits.wait(self._exchange.read)) is None:
                raise StopAsyncIteration
            return part

        async def aclose(self) -> None:
            await self._exchange.close()

    class Transport(httpx.AsyncBaseTransport):  # type: ignore[name-defined,misc]
        async def handle_async_request(self, request: Any) -> Any:
            limits = _Limits(httpx, request)
            exchange = Exchange(app, _scope(request), await request.aread())
            try:
                status, headers = await limits.wait(exchange.begin)
            except BaseException:
                await exchange.close()
                raise
            return httpx.Response(status, headers=headers, stream=Body(exchange, limits))

    return Transport()


def sync_transport(httpx: ModuleType, app: App) -> Any:
    """A `BaseTransport` of this library, which runs the application on an event loop on a thread
    of its own. Closing it ends the thread."""
    loop = EventLoopThread("asyncinfer-client")

    class SyncBody(httpx.SyncByteStream):  # type: ignore[name-defined,misc]
        def __init__(self, exchange: Exchange, limits: _Limits) -> None:
            self._exchange = exchange
            self._limits = limits

        def __iter__(self) -> Iterator[bytes]:
            while (part := loop.run(self._read)) is not None:
                yield part

        async def _read(self) -> bytes | None:
            return await self._limits.wait(self._exchange.read)

        def close(self) -> None:
            # A loop that was stopped has cancelled the exchange already.
            with suppress(EngineClosed):
                loop.run(self._exchange.close)

    class SyncTransport(httpx.BaseTransport):  # type: ignore[name-defined,misc]
        def handle_request(self, request: Any) -> Any:
            limits, body = _Limits(httpx, request), request.read()

            async def begin() -> tuple[Exchange, int, list[tuple[bytes, bytes]]]:
                exchange = Exchange(app, _scope(request), body)
                try:
                    answer = await limits.wait(exchange.begin)
                except BaseException:
                    await exchange.close()
                    raise
                return exchange, *answer

            exchange, status, headers = loop.run(begin)
            return httpx.Response(status, headers=headers, stream=SyncBody(exchange, limits))

        def close(self) -> None:
            loop.stop()

        def __del__(self) -> None:
            loop.stop_soon()

    return SyncTransport()


class _Limits:
    """The `read` timeout of a request, and the library's exceptions for what goes wrong."""

    def __init__(self, httpx: ModuleType, request: Any) -> None:
        self._httpx = httpx
        self._request = request
        self._seconds: float | None = request.extensions.get("timeout", {}).get("read")

    async def wait(self, call: Callable[[float | None], Awaitable[T]]) -> T:
        try:
            return await call(self._seconds)
        except TimeoutError:
            message = f"no answer within {self._seconds} s"
            raise self._httpx.ReadTimeout(message, request=self._request) from None
        except Broken as error:
            raise self._httpx.RemoteProtocolError(str(error), request=self._request) from error


def _scope(request: Any) -> dict[str, Any]:
    url = request.url
    return {
        "type": "http",
        "asgi": {"version": "3.0", "spec_version": "2.3"},
        "http_version": "1.1",
        "method": request.method,
        "headers": [(name.lower(), value) for name, value in request.headers.raw],
        "scheme": url.scheme,
        "path": url.path,
        "raw_path": url.raw_path.partition(b"?")[0],
        "query_string": url.query,
        "server": (url.host, url.port),
        "client": ("in-process", 0),
        "root_path": "",
        # A client that leaves cancels the application, which need not watch for that.
        "extensions": {CANCELS: {}},
    }
