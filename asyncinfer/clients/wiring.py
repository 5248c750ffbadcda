"""Making a vendor's client talk to an engine in this process."""

from __future__ import annotations

import sys
from collections.abc import Awaitable, Mapping, Sequence
from importlib import import_module
from types import ModuleType
from typing import Any, Final

from asyncinfer.clients.exchange import App
from asyncinfer.clients.transport import async_transport, sync_transport
from asyncinfer.engine import Engine, SyncEngine

__all__ = ["async_client", "in_process_transport", "sync_client"]

#: Nobody listens there: the transport opens no socket.
_URL: Final = "http://asyncinfer.invalid"

Engines = SyncEngine | Engine | Mapping[str, Engine]


def async_client(
    package: str, kind: str, path: str, engine: Engines, scope: str, options: Mapping[str, Any]
) -> Any:
    """The client `kind` of a package. `path`: what its URLs begin with.

    Raises `ModuleNotFoundError`, naming what to install.
    """
    module = _module(package)
    httpx = _http_library(module)
    http = httpx.AsyncClient(transport=in_process_transport(httpx, engine, cache_scope=scope))
    return getattr(module, kind)(**_options(path, http, options))


def sync_client(
    package: str, kind: str, path: str, engine: Engines, scope: str, options: Mapping[str, Any]
) -> Any:
    """`async_client` for a client that blocks."""
    module = _module(package)
    httpx = _http_library(module)
    http = httpx.Client(transport=sync_transport(httpx, _app(engine, scope)))
    return getattr(module, kind)(**_options(path, http, options))


def in_process_transport(httpx: ModuleType, engine: Engines, *, cache_scope: str = "") -> Any:
    """A transport of `httpx` or `httpx2`, by which any client of that library talks to an engine,
    or to several by name. The URL's host is ignored."""
    return async_transport(httpx, _app(engine, cache_scope))


def _module(package: str) -> ModuleType:
    try:
        return import_module(package)
    except ModuleNotFoundError as error:
        if error.name != package:
            raise
        raise ModuleNotFoundError(
            f'this client needs {package}: pip install "asyncinfer[{package}]"', name=package
        ) from error


def _http_library(module: ModuleType) -> ModuleType:
    """The library that a client imports: httpx2, or httpx in older ones."""
    client = sys.modules[f"{module.__name__}._base_client"]
    return next(import_module(name) for name in ("httpx2", "httpx") if hasattr(client, name))


def _options(path: str, http: Any, options: Mapping[str, Any]) -> dict[str, Any]:
    own = {"api_key": "in-process", "base_url": f"{_URL}{path}", "http_client": http}
    return {**own, **options}


def _app(engine: Engines, scope: str) -> App:
    from asyncinfer.server import create_app

    engines = engine.engine if isinstance(engine, SyncEngine) else engine
    app = create_app(engines, cache_scope=scope)
    routes: Sequence[Any] = app.routes
    posts: dict[str, App] = {each.path: each.app for each in routes if "POST" in each.methods}

    def direct(scope: Any, receive: Any, send: Any) -> Awaitable[None]:
        # Bypasses the middleware, which would handle each event.
        path = scope["path"] if scope["method"] == "POST" else ""
        return posts.get(path, app)(scope, receive, send)

    return direct
