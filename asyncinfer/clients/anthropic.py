"""Anthropic's clients on an engine in this process."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from asyncinfer.clients.wiring import async_client, sync_client
from asyncinfer.engine import Engine, SyncEngine

if TYPE_CHECKING:
    import anthropic

__all__ = ["anthropic_client", "sync_anthropic_client"]


def anthropic_client(
    engine: Engine | Mapping[str, Engine], *, cache_scope: str = "", **options: Any
) -> anthropic.AsyncAnthropic:
    """Anthropic's own client on this engine, or on several by name; see `openai_client`."""
    made: anthropic.AsyncAnthropic = async_client(
        "anthropic", "AsyncAnthropic", "", engine, cache_scope, options
    )
    return made


def sync_anthropic_client(
    engine: SyncEngine | Engine | Mapping[str, Engine], *, cache_scope: str = "", **options: Any
) -> anthropic.Anthropic:
    """`anthropic_client` for programs without an event loop. Close it, or use it as a context
    manager: it has a thread."""
    made: anthropic.Anthropic = sync_client(
        "anthropic", "Anthropic", "", engine, cache_scope, options
    )
    return made
