"""OpenAI's clients on an engine in this process."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from asyncinfer.clients.wiring import async_client, sync_client
from asyncinfer.engine import Engine, SyncEngine

if TYPE_CHECKING:
    import openai

__all__ = ["openai_client", "sync_openai_client"]


def openai_client(
    engine: Engine | Mapping[str, Engine], *, cache_scope: str = "", **options: Any
) -> openai.AsyncOpenAI:
    """OpenAI's own client, whose requests go to this engine, or to several by name, without a
    socket. A request that is cancelled, or a stream that is closed, ends at once.

    Args:
        cache_scope: the scope of its requests' cached prefixes.
        options: those of `openai.AsyncOpenAI`, such as `timeout` and `max_retries`.

    Raises `ModuleNotFoundError` where openai or starlette is not installed.
    """
    made: openai.AsyncOpenAI = async_client(
        "openai", "AsyncOpenAI", "/v1", engine, cache_scope, options
    )
    return made


def sync_openai_client(
    engine: SyncEngine | Engine | Mapping[str, Engine], *, cache_scope: str = "", **options: Any
) -> openai.OpenAI:
    """`openai_client` for programs without an event loop. Close it, or use it as a context
    manager: it has a thread."""
    made: openai.OpenAI = sync_client("openai", "OpenAI", "/v1", engine, cache_scope, options)
    return made
