"""`Engine`: the object applications hold."""

from __future__ import annotations

import dataclasses
import warnings
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import Any

from asyncinfer.checks import suggestion
from asyncinfer.chunk import Completion, EngineHealth, EngineStats
from asyncinfer.config import EngineConfig, OnFull
from asyncinfer.engine.admission import Admission
from asyncinfer.engine.assemble import open_core, source_of
from asyncinfer.engine.closing import close
from asyncinfer.engine.frontend import Frontend
from asyncinfer.engine.health import failed, health_of
from asyncinfer.engine.inbox import Command
from asyncinfer.engine.options import RequestOptions
from asyncinfer.engine.runtime import Runtime, Threads
from asyncinfer.engine.source import ModelSource, Progress
from asyncinfer.engine.stream import Stream
from asyncinfer.engine.thread import DecodeThread
from asyncinfer.errors import EngineClosed, InvalidRequest
from asyncinfer.params import SamplingParams

__all__ = ["Engine"]

_SAMPLING = frozenset(field.name for field in dataclasses.fields(SamplingParams))
_OPTIONS = _SAMPLING | {field.name for field in dataclasses.fields(RequestOptions)}


class Engine:
    """An LLM in this process, to be awaited.

    `Engine(model)` takes a local folder or a hub id in the Hugging Face format; without one it is
    the small model shipped with the package. Options are those of `EngineConfig`, as `config=` or
    by name. Use it as an async context manager, or `await Engine.open(...)` and `aclose()`.

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
        self.config = base.replace(**overrides) if overrides else base
        self._source = source_of(model)
        self._progress = progress
        self._admission = Admission(
            self.config.max_requests, self.config.max_held_bytes, self._runtime.clock
        )
        self._frontend = Frontend(self.config, self._admission, self._runtime)
        self._thread: DecodeThread | None = None

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
        engine = cls(model, config=config, progress=progress, **overrides)
        await engine._open()
        return engine

    async def __aenter__(self) -> Engine:
        await self._open()
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        await self.aclose(drain_timeout=None if kind is None else 0.0)

    def stream(
        self,
        prompt: Any,
        *,
        params: SamplingParams | None = None,
        priority: int = 0,
        deadline: float | None = None,
        cache_scope: str = "",
        buffer: int | None = None,
        on_full: OnFull | None = None,
        **sampling: Any,
    ) -> Stream:
        """A stream of the answer to `prompt`: a string, a list of token ids or chat messages.

        Sampling options are those of `SamplingParams`, as `params=` or by name; with names alone,
        what is not named is the model's own default: see `default_params`. Raises
        `InvalidRequest` for bad options here, and for a bad prompt when the stream starts.
        """
        core = self._frontend.check()
        options = RequestOptions(
            priority=priority,
            deadline=deadline,
            cache_scope=cache_scope,
            buffer=self.config.buffer if buffer is None else buffer,
            on_full=self.config.on_full if on_full is None else on_full,
        )
        for name in sampling.keys() - _SAMPLING:
            near = suggestion(name, sorted(_OPTIONS))
            raise InvalidRequest(name, sampling[name], f"is not an option of stream(){near}")
        if params is None:
            params = core.loaded.defaults.params(sampling)
        elif not isinstance(params, SamplingParams):
            raise InvalidRequest("params", params, "must be SamplingParams")
        elif sampling:
            params = dataclasses.replace(params, **sampling)
        if params.n > self.config.max_requests:
            # `Overloaded` would say "later", and there is no later for this one.
            raise InvalidRequest(
                "n", params.n, f"must be <= max_requests={self.config.max_requests}"
            )
        return Stream(self._frontend, prompt, params, options, owner=self)

    @property
    def default_params(self) -> SamplingParams:
        """The options of a request that names none: those of the model's generation_config.json,
        greedy where that does not say `do_sample`. Raises as `stream` does while the engine is not
        open."""
        return self._frontend.check().loaded.defaults.params({})

    async def generate(self, prompt: Any, **options: Any) -> Completion:
        """The whole answer at once; options as for `stream`. Cancelling it aborts the request."""
        self._frontend.check()
        if options.get("deadline") is None:
            # One that has a deadline is registered at once, since it may pass in the line.
            await self._frontend.turn()
        return await self.stream(prompt, **options)

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
                self._runtime.clock,
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
            # The thread stops at the next tensor, gives back what it has, and is nobody's.
            thread.cancel_open()
            self._thread = None
            raise
        if thread.load_error is not None:
            raise thread.load_error
        assert thread.core is not None
        self._frontend.opened(thread.core)

    def __del__(self) -> None:
        thread = getattr(self, "_thread", None)
        if thread is None or not self._frontend.here:
            return
        self._frontend.dismiss()
        if thread.closed.is_set:
            return
        self._frontend.post(Command.CLOSE, 0.0)
        warnings.warn(
            "an Engine was dropped without aclose(); use `async with Engine(...)`",
            ResourceWarning,
            source=self,
            stacklevel=2,
        )
