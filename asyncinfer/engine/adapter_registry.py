"""`AdapterRegistry`: the adapters of an engine by name, and who uses them."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from dataclasses import replace
from itertools import count
from threading import RLock
from typing import Any, Protocol

from asyncinfer.errors import AsyncInferError, InvalidRequest
from asyncinfer.stats import AdapterInfo, EngineStats
from asyncinfer.suggestions import suggestion

__all__ = ["AdapterInSlot", "AdapterRegistry", "AdapterUse", "PendingLoad", "RunnerAdapters"]


class AdapterInSlot(Protocol):
    """An adapter that the runner has."""

    @property
    def slot(self) -> int:
        """The runner's slot that holds it."""

    @property
    def rank(self) -> int: ...

    @property
    def bytes(self) -> int: ...

    @property
    def base(self) -> str | None:
        """The model it was trained on."""


class RunnerAdapters(Protocol):
    """A runner's memory for adapters. Any thread may call it while steps run."""

    @property
    def bytes(self) -> int:
        """Bytes of all adapters that are loaded."""

    def read(
        self,
        source: str | os.PathLike[str] | Mapping[str, Any],
        config: Mapping[str, Any] | None,
        revision: str | None,
    ) -> AdapterInSlot:
        """Read an adapter into a free slot. Raises `ModelLoadError`."""

    def release(self, loaded: Any) -> None:
        """Free the slot of an adapter that no row takes any more, and none will."""


class PendingLoad(Protocol):
    """A load that somebody waits for."""

    def refuse(self, error: AsyncInferError) -> None:
        """Fail the load with `error`. Any thread."""


class AdapterUse:
    """An adapter under a name, from its load until nobody needs it. Written by the registry."""

    __slots__ = ("_registry", "key", "loaded", "name", "replaces", "retired", "users")

    def __init__(
        self,
        registry: AdapterRegistry,
        name: str,
        number: int,
        loaded: AdapterInSlot,
    ) -> None:
        self._registry = registry
        self.name = name
        #: Part of the cache's namespace: each load has its own key, also under the same name.
        self.key = f"{number}:{name}"
        self.loaded = loaded
        #: Requests that hold it.
        self.users = 0
        #: Whether its name was removed or given to another load.
        self.retired = False
        #: Whether the load took its name over from another adapter.
        self.replaces = False

    @property
    def slot(self) -> int:
        """The runner's slot that holds it."""
        return self.loaded.slot

    def release(self) -> None:
        """Give back a request's hold on it."""
        self._registry.release(self)

    @property
    def info(self) -> AdapterInfo:
        loaded = self.loaded
        return AdapterInfo(self.name, loaded.rank, loaded.bytes, loaded.base, self.users)


class AdapterRegistry:
    """Callable from any thread. A name changes hands at once, and a request holds the adapter that
    it began with until its end, so that steps need not know of loads."""

    def __init__(self, pool: RunnerAdapters | None) -> None:
        """`pool` None: the model takes no adapters."""
        self.pool = pool
        self._named: dict[str, AdapterUse] = {}
        self._numbers = count(1)
        self._pending: dict[PendingLoad, None] = {}
        #: Why no adapter is loaded any more; None while the engine is open.
        self._over: Callable[[], AsyncInferError] | None = None
        # Reentrant, as all locks of an engine: a finalizer of the program's may call in here.
        self._lock = RLock()

    def begin(self, load: PendingLoad) -> None:
        """Note a load, which is refused if the engine ends before its `finished`. Raises what the
        engine has ended with."""
        with self._lock:
            if self._over is not None:
                raise self._over()
            self._pending[load] = None

    def finished(self, load: PendingLoad) -> None:
        """Forget a load that nobody waits for any more. Takes no lock: a finalizer may call it."""
        self._pending.pop(load, None)

    def refuse_loads(self, error: Callable[[], AsyncInferError]) -> None:
        """Refuse loads from now on, since the engine closes."""
        with self._lock:
            self._over = self._over or error
            pending = list(self._pending)
        for load in pending:
            load.refuse(error())

    def close(self, error: Callable[[], AsyncInferError]) -> None:
        """The engine has ended. Its adapters' memory is the runner's alone from now on."""
        self.refuse_loads(error)
        with self._lock:
            self.pool = None
            self._named.clear()

    def complete(self, stats: EngineStats) -> EngineStats:
        """The counters, with those of the adapters."""
        pool = self.pool
        if pool is None:
            return stats
        return replace(stats, adapters=len(self._named), adapter_bytes=pool.bytes)

    def list(self) -> tuple[AdapterInfo, ...]:
        """The adapters that requests may name, in the order of their loads."""
        with self._lock:
            return tuple(use.info for use in self._named.values())

    def check(self, name: Any) -> None:
        """Raise `InvalidRequest` unless an adapter of this name is loaded."""
        with self._lock:
            self._get("adapter", name)

    def acquire(self, name: str) -> AdapterUse:
        """Hold the adapter of this name until its `release`. Raises as `check` does."""
        with self._lock:
            use = self._get("adapter", name)
            use.users += 1
            return use

    def release(self, use: AdapterUse) -> None:
        """Give back a request's hold on an adapter."""
        with self._lock:
            use.users -= 1
            self._free_if_idle(use)

    def put(self, name: str, loaded: AdapterInSlot) -> AdapterInfo:
        """Let `name` stand for this adapter from now on."""
        use = AdapterUse(self, name, next(self._numbers), loaded)
        with self._lock:
            before = self._named.pop(name, None)
            self._named[name] = use
            if before is not None:
                use.replaces = True
                self._retire(before)
            return use.info

    def withdraw(self, name: str, loaded: AdapterInSlot) -> None:
        """Undo a `put`, if the name still stands for this adapter. An adapter that `loaded`
        replaced is gone, so `loaded` keeps the name."""
        with self._lock:
            use = self._named.get(name)
            if use is not None and use.loaded is loaded and not use.replaces:
                self._retire(use)
                del self._named[name]

    def remove(self, name: str) -> None:
        """Let no further request name the adapter. Raises `InvalidRequest` for an unknown name."""
        with self._lock:
            self._retire(self._get("name", name))
            del self._named[name]

    def _retire(self, use: AdapterUse) -> None:
        use.retired = True
        self._free_if_idle(use)

    def _free_if_idle(self, use: AdapterUse) -> None:
        if use.retired and not use.users and self.pool is not None:
            self.pool.release(use.loaded)

    def _get(self, field: str, name: Any) -> AdapterUse:
        if self.pool is None:
            raise InvalidRequest(field, name, "this model takes no adapters")
        use = self._named.get(name) if isinstance(name, str) else None
        if use is None:
            known = ", ".join(self._named) or "none"
            near = suggestion(name, self._named) if isinstance(name, str) else ""
            raise InvalidRequest(field, name, f"must be an adapter that is loaded: {known}{near}")
        return use
