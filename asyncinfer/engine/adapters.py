"""`Adapters`: LoRA adapters that are loaded and unloaded while the engine serves."""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Mapping
from contextlib import suppress
from threading import RLock
from typing import TYPE_CHECKING, Any, Final

from asyncinfer.bounds import MAX_ADAPTER_NAME
from asyncinfer.checks import check_string
from asyncinfer.engine.adapter_registry import AdapterInSlot, AdapterRegistry, RunnerAdapters
from asyncinfer.engine.frontend import Frontend
from asyncinfer.engine.loop_bridge import Latch
from asyncinfer.engine.uncopied import Uncopied
from asyncinfer.errors import (
    AsyncInferError,
    EngineClosed,
    InvalidRequest,
    ModelLoadError,
    Overloaded,
)
from asyncinfer.runtime import Runtime, cancellable
from asyncinfer.stats import AdapterInfo
from asyncinfer.telemetry import emit

if TYPE_CHECKING:
    import torch

__all__ = ["Adapters"]

#: Most loads that wait for their turn.
MOST_LOADS: Final = 16


class Adapters(Uncopied):
    """The LoRA adapters of an engine, `engine.adapters`. Requests name theirs by `adapter=`.

    Adapters are read and copied to the device one after the other, on a thread of their own while
    steps run. Requests may name one as soon as all of it is loaded.
    """

    def __init__(self, frontend: Frontend, runtime: Runtime, model: str | None) -> None:
        """`model`: the name of the engine's model, if it has one."""
        self._frontend = frontend
        self._model = model
        self._loader = _Loader(runtime)

    async def load(
        self,
        name: str,
        source: str | os.PathLike[str] | Mapping[str, torch.Tensor],
        *,
        config: Mapping[str, Any] | None = None,
        revision: str | None = None,
    ) -> AdapterInfo:
        """Load an adapter that PEFT saved, and let requests name it.

        `name` may be that of another adapter: requests that come from now on get the new one, those
        that are there keep the old one until they end.

        Args:
            source: a folder with `adapter_config.json` and `adapter_model.safetensors`, the id of
                such a one on the hub, or tensors by PEFT's names.
            config: in place of the file `adapter_config.json`; tensors need it, with `lora_alpha`
                at least.
            revision: of a hub id: a branch, tag or commit.

        Raises `InvalidRequest` for a bad name, and `ModelLoadError`, naming file and tensor, for an
        adapter that does not fit the model or its bounds (`max_adapters`, `max_adapter_rank`,
        `adapter_bytes`) and for a kind of adapter that is not supported; `Overloaded` where 16
        loads wait, and `EngineClosed` or `EngineDead` as soon as the engine closes or dies.
        Cancelled, it leaves nothing behind.
        """
        registry = self._registry()
        check_string("name", name, MAX_ADAPTER_NAME, least=1)
        if registry.pool is None:
            raise InvalidRequest("name", name, "this model takes no adapters")
        if not isinstance(source, str | os.PathLike | Mapping):
            raise InvalidRequest("source", source, "must be a folder, a hub id or a state dict")
        if config is not None and not isinstance(config, Mapping):
            raise InvalidRequest("config", config, "must be a mapping, as adapter_config.json is")
        load = _Load(registry, self._model, name, source, config, revision)
        bridge = self._frontend.bridge()
        registry.begin(load)
        try:
            self._loader.give(load)
            await load.done.wait(bridge)
        except BaseException as error:
            load.abandon()
            self._loader.drop(load)
            if not isinstance(error, GeneratorExit):
                # A finalizer must take no lock, so the load withdraws itself.
                load.withdraw()
            raise
        finally:
            registry.finished(load)
        return load.outcome()

    async def unload(self, name: str) -> None:
        """Let no further request name this adapter. Requests that have it go on to their end; then
        its memory is free. Raises `InvalidRequest` for a name that is not known."""
        self._registry().remove(name)
        emit("adapter_unloaded", name=name)

    def list(self) -> tuple[AdapterInfo, ...]:
        """The adapters that requests may name, in the order of their loads. From any thread."""
        return self._registry().list()

    def _registry(self) -> AdapterRegistry:
        return self._frontend.check().adapters


class _Loader:
    """The thread that reads adapters, one after the other. It ends when there are no more."""

    name = "asyncinfer-adapter"

    def __init__(self, runtime: Runtime) -> None:
        self._runtime = runtime
        self._waiting: deque[_Load] = deque()
        self._runs = False
        self._lock = RLock()

    @property
    def ready(self) -> bool:
        return bool(self._waiting)

    def give(self, load: _Load) -> None:
        """Queue a load. Raises `Overloaded`, also where no thread can be started."""
        with self._lock:
            if len(self._waiting) >= MOST_LOADS:
                raise Overloaded(f"{MOST_LOADS} adapters wait to be read; try again later")
            if not self._runs:
                try:
                    self._runtime.start(self)
                except RuntimeError as error:
                    raise Overloaded(
                        f"no thread can be started to read an adapter: {error}"
                    ) from error
                self._runs = True
            self._waiting.append(load)

    def drop(self, load: _Load) -> None:
        """Drop a load that nobody waits for any more. Takes no lock: a finalizer may call it."""
        with suppress(ValueError):
            self._waiting.remove(load)

    def turn(self) -> float | None:
        with self._lock:
            try:
                load = self._waiting.popleft()
            except IndexError:
                self._runs = False
                return None
        load.run()
        return 0.0

    def wait(self, seconds: float) -> None: ...


class _Load:
    """One load, from its beginning until an adapter or an error comes of it."""

    def __init__(
        self,
        registry: AdapterRegistry,
        model: str | None,
        name: str,
        source: str | os.PathLike[str] | Mapping[str, torch.Tensor],
        config: Mapping[str, Any] | None,
        revision: str | None,
    ) -> None:
        self.done = Latch()
        self._registry = registry
        self._model = model
        self._name = name
        self._source: Any = source
        self._config = config
        self._revision = revision
        self._result: AdapterInfo | BaseException | None = None
        #: Whoever pops the only entry decides how the load ends. A pop needs no lock, so a
        #: finalizer may do it.
        self._open = [True]
        #: Whether nobody will ask for the outcome.
        self._left = False
        #: The adapter that got the name.
        self._named: AdapterInSlot | None = None

    def abandon(self) -> None:
        """Give up the load, since the task that waited was cancelled."""
        self._left = True
        self._decide()
        self._result = None

    def withdraw(self) -> None:
        """Take the name back from an adapter that no caller was given."""
        if self._named is not None:
            self._registry.withdraw(self._name, self._named)

    def refuse(self, error: AsyncInferError) -> None:
        """Fail the load, since the engine has ended."""
        if self._decide():
            self._result = error
            self.done.set()

    def _decide(self) -> bool:
        """Whether the caller may say what comes of the load; false for all but the first."""
        with suppress(IndexError):
            return self._open.pop()
        return False

    def outcome(self) -> AdapterInfo:
        """The result of a load that is done. Raises the error it failed with."""
        if isinstance(self._result, AdapterInfo):
            return self._result
        assert self._result is not None
        error, self._result = self._result, None
        try:
            raise error
        finally:
            # The error's traceback refers to this frame.
            del error

    def run(self) -> None:
        """Read the adapter and let requests name it. On the loader's thread."""
        try:
            pool = self._registry.pool
            if pool is not None and self._open:
                self._load(pool)
        except Exception as error:
            self._fail(error)
        except BaseException as error:
            self._fail(ModelLoadError(f"{type(error).__name__}: {error}"))
        self._source = None
        # If another caller has decided, it reports the outcome.
        if self._result is not None or self._open:
            self.done.set()
        if self._left:
            # An error's traceback refers to the load: only the garbage collector would free both.
            self._result = None

    def _load(self, pool: RunnerAdapters) -> None:
        with cancellable(self._check):
            loaded = pool.read(self._source, self._config, self._revision)
        if not self._decide():
            pool.release(loaded)
            return
        try:
            info = self._result = self._registry.put(self._name, loaded)
        except BaseException as error:
            self._result = error
            raise
        # The order matters: a task that leaves meanwhile either finds the name, or is found below.
        self._named = loaded
        if self._left:
            self.withdraw()
            return
        base, model = info.base_model, self._model
        if base is not None and model is not None and _last(base) != _last(model):
            emit("adapter_base_differs", name=self._name, base=base, model=model)
        emit("adapter_loaded", name=self._name, rank=info.rank, bytes=info.bytes)

    def _check(self) -> None:
        """Stop reading when nobody waits for the load, since other loads wait for the thread."""
        if not self._open:
            raise EngineClosed(f"the load of adapter {self._name!r} was cancelled")

    def _fail(self, error: BaseException) -> None:
        if self._decide():
            self._result = error


def _last(model: str) -> str:
    """The last part of a path or hub id: the same model may lie in a folder."""
    return model.rstrip("/").rpartition("/")[2].lower()
