"""`Engine`: the object applications hold."""

from __future__ import annotations

import warnings
from functools import partial
from pathlib import Path
from typing import Any

import anyio

from asyncinfer.config import EngineConfig
from asyncinfer.engine.adapters import Adapters
from asyncinfer.engine.admission import Admission
from asyncinfer.engine.assemble import open_core, source_of
from asyncinfer.engine.closing import close
from asyncinfer.engine.engine_tokenizer import EngineTokenizer
from asyncinfer.engine.frontend import Frontend
from asyncinfer.engine.health import failed, health_of
from asyncinfer.engine.inference import Inference
from asyncinfer.engine.model_info import ModelInfo, info_of
from asyncinfer.engine.source import ModelSource, Progress
from asyncinfer.engine.thread import DecodeThread
from asyncinfer.engine.uncopied import Uncopied
from asyncinfer.errors import EngineClosed
from asyncinfer.params import SamplingParams
from asyncinfer.runtime import Runtime, Threads
from asyncinfer.stats import EngineHealth, EngineStats

__all__ = ["Engine"]


class Engine(Inference, Uncopied):
    """An LLM in this process, to be awaited.

    `Engine(model)` takes a local folder, a GGUF file, a known name or a hub id; without one, or
    with "embedded", it is the small model shipped with the package. Options are those of
    `EngineConfig`, as `config=` or by name. Use it as an async context manager, or
    `await Engine.open(...)` and `aclose()`.

    Requests may come from any event loop (asyncio, uvloop, trio) and thread.
    """

    #: Where time and threads come from; a simulation's subclass has its own.
    _runtime: Runtime = Threads()

    def __init__(
        self,
        model: str | Path | ModelSource | None = None,
        *,
        config: EngineConfig | None = None,
        progress: Progress | None = None,
        **overrides: Any,
    ) -> None:
        base = EngineConfig() if config is None else config
        if not isinstance(base, EngineConfig):
            raise TypeError(f"config={config!r}: must be an EngineConfig")
        if progress is not None and not callable(progress):
            raise TypeError(f"progress={progress!r}: must be callable")
        self.config = base.replace(**overrides) if overrides else base
        self._source = source_of(model)
        self._progress = progress
        self._admission = Admission(
            self.config.max_requests, self.config.max_held_bytes, self._runtime.clock
        )
        self._frontend = Frontend(self.config, self._admission, self._runtime)
        named = getattr(self._source, "model", None)
        #: LoRA adapters, to be loaded and unloaded while the engine serves.
        self.adapters = Adapters(
            self._frontend, self._runtime, None if named is None else str(named)
        )
        self._thread: DecodeThread | None = None
        #: The task in whose `async with` the engine is.
        self._opener: int | None = None

    @classmethod
    async def open(
        cls,
        model: str | Path | ModelSource | None = None,
        *,
        config: EngineConfig | None = None,
        progress: Progress | None = None,
        **overrides: Any,
    ) -> Engine:
        """An engine that is ready; close it with `aclose()`. Raises `ModelLoadError`."""
        return await cls(model, config=config, progress=progress, **overrides).__aenter__()

    async def __aenter__(self) -> Engine:
        self._opener = _current_task()
        await self._open()
        return self

    async def __aexit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if kind is GeneratorExit and _current_task() != self._opener:
            # A finalizer closes the coroutine: nothing can be awaited, and no lock be taken.
            self._frontend.forget()
            return
        await self.aclose(drain_timeout=None if kind is None else 0.0)

    @property
    def default_params(self) -> SamplingParams:
        """The options of a request that names none: those of the model's generation_config.json,
        greedy where that does not say `do_sample`. Raises `EngineClosed` before the engine is
        open."""
        return self._frontend.loaded.defaults.params({})

    @property
    def tokenizer(self) -> EngineTokenizer:
        """The model's tokenizer and chat template, as requests use them. Raises `EngineClosed`
        before the engine is open, and not after it was closed."""
        return EngineTokenizer(self._frontend.loaded, self.config)

    @property
    def model(self) -> ModelInfo:
        """The model's name, context, vocabulary and the like. Raises as `tokenizer` does."""
        return info_of(self._source, self._frontend.loaded, self.config)

    def stats(self) -> EngineStats:
        """A snapshot of the counters, from any thread, without waiting."""
        core = self._frontend.core
        return EngineStats() if core is None else core.snapshot()

    def health(self) -> EngineHealth:
        """Whether the engine serves, and why not; from any thread, without waiting."""
        thread, core = self._thread, self._frontend.core
        if thread is None or not self._frontend.here:
            why = "it was not opened" if self._frontend.here else "it lives in another process"
            return EngineHealth("closed", (why,))
        if core is None:
            return EngineHealth("opening") if thread.load_error is None else failed(thread)
        return health_of(core, self._admission, thread, self.config, self._runtime.clock())

    async def aclose(self, *, drain_timeout: float | None = None) -> None:
        """Refuse new requests, let running ones go on for `drain_timeout` seconds (None takes the
        configuration's, 0 aborts them), and give all memory back. A second call does nothing.
        An engine that is being opened is closed at once, and whoever opens it gets `EngineClosed`.

        Cancelled, it aborts what runs, and still waits for the step that runs. Raises `EngineDead`
        if that hangs, `ValueError` for a bad `drain_timeout`; never hangs itself.
        """
        thread = self._thread
        if thread is None or not self._frontend.here:
            return
        config = self.config
        if drain_timeout is not None:
            config = config.replace(drain_timeout=drain_timeout)
        await close(self._frontend, thread, config.drain_timeout, self._runtime.clock)

    async def _open(self) -> None:
        if self._thread is not None:
            raise EngineClosed("an engine is opened once; make another")
        bridge = self._frontend.bridge()
        thread = DecodeThread(
            partial(
                open_core,
                self._source,
                self.config,
                self._progress,
                self._admission,
                self._frontend.bridges,
                self._runtime,
            ),
            home=bridge,
            admission=self._admission,
            runtime=self._runtime,
            step_timeout=self.config.step_timeout,
        )
        thread.start()
        self._thread = thread
        try:
            await thread.opened.wait(bridge)
        except BaseException:
            # The thread stops at the next tensor and gives back what it has by itself.
            thread.cancel_open()
            self._thread = None
            raise
        self._frontend.opened(thread.opened_core())

    def __del__(self) -> None:
        thread = getattr(self, "_thread", None)
        if thread is None or not self._frontend.here:
            return
        self._frontend.forget()
        if thread.closed.is_set:
            return
        warnings.warn(
            "an Engine was dropped without aclose(); use `async with Engine(...)`",
            ResourceWarning,
            source=self,
            stacklevel=2,
        )


def _current_task() -> int | None:
    """The running task's number; None outside of an event loop."""
    try:
        return anyio.get_current_task().id
    except RuntimeError:
        return None
