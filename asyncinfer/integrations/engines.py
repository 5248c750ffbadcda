"""Either engine, as the awaited one."""

from __future__ import annotations

from asyncinfer.engine import Engine, SyncEngine

__all__ = ["AnyEngine", "awaited"]

AnyEngine = Engine | SyncEngine


def awaited(engine: AnyEngine) -> Engine:
    """The engine, or the one behind a `SyncEngine`."""
    return engine.engine if isinstance(engine, SyncEngine) else engine
