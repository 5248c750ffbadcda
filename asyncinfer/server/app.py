"""`create_app`: the application and its paths."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from asyncinfer.bounds import MAX_BODY_BYTES
from asyncinfer.checks import check_integer, checking_config
from asyncinfer.server.hosts import check_hosts, check_origins
from asyncinfer.server.keys import ApiKey, Keys
from asyncinfer.server.models import Served

if TYPE_CHECKING:
    from starlette.applications import Starlette

__all__ = ["create_app"]


def create_app(
    engines: Served | Mapping[str, Served],
    *,
    keys: Mapping[str, ApiKey] | None = None,
    cache_scope: str = "",
    max_body_bytes: int = MAX_BODY_BYTES,
    cors_origins: Sequence[str] = (),
    allowed_hosts: Sequence[str] = (),
    page: bool = False,
) -> Starlette:
    """An ASGI application that serves engines by the protocols of OpenAI and Anthropic.

    The engines are yours to open and close: a mounted application has no lifespan of its own. It
    runs on any event loop, and each request ends when its client leaves.

    Args:
        engines: one engine, named after its model, or several by the names that requests use. An
            engine may have several names. Loaded LoRA adapters are models as well.
        keys: bearer keys, and what each of them allows. None lets everybody in.
        cache_scope: the scope of all requests where there are no keys.
        max_body_bytes: largest body of a request; a longer one is a 413.
        cors_origins: origins whose pages browsers let read answers, such as "https://example.com",
            or "*".
        page: whether there is a chat page at the application's root.
        allowed_hosts: values of the header `Host` that are served, without ports; empty serves all.

    Raises `InvalidConfig` for bad arguments, and `ModuleNotFoundError` without the extra `server`.
    """
    try:
        from asyncinfer.server.routes import make
    except ModuleNotFoundError as error:
        if (error.name or "").partition(".")[0] != "starlette":
            raise
        message = 'create_app() needs starlette: pip install "asyncinfer[server]"'
        raise ModuleNotFoundError(message, name=error.name) from error
    with checking_config():
        check_integer("max_body_bytes", max_body_bytes, 1)
    origins, hosts = check_origins(cors_origins), check_hosts(allowed_hosts)
    made = Keys(keys, ApiKey(cache_scope=cache_scope))
    return make(engines, made, max_body_bytes, origins, hosts, page)
