"""`SyncEngine`: the engine for programs without an event loop."""

from __future__ import annotations

import os
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from asyncinfer.chunk import Completion
from asyncinfer.config import EngineConfig
from asyncinfer.engine.adapters import Adapters
from asyncinfer.engine.embedding import Embeddings, Score
from asyncinfer.engine.engine import Engine
from asyncinfer.engine.engine_tokenizer import EngineTokenizer
from asyncinfer.engine.event_loop_thread import EventLoopThread
from asyncinfer.engine.hold import Pin
from asyncinfer.engine.model_info import ModelInfo
from asyncinfer.engine.source import ModelSource, Progress
from asyncinfer.engine.sync_session import SyncSession
from asyncinfer.engine.sync_stream import SyncStream
from asyncinfer.engine.uncopied import Uncopied
from asyncinfer.errors import EngineClosed
from asyncinfer.params import SamplingParams
from asyncinfer.stats import AdapterInfo, EngineHealth, EngineStats

if TYPE_CHECKING:
    import torch

T = TypeVar("T")

__all__ = ["SyncAdapters", "SyncEngine"]


class SyncEngine(Uncopied):
    """An `Engine` for scripts, notebooks and threads of a web server: calls block until they have
    their answer, streams are plain iterators.

    Arguments are those of `Engine`. Use it as a context manager, or `SyncEngine.open(...)` and
    `close()`. Any thread may call it, and many at once, whose requests are decoded together. An
    event loop on a thread of its own does the waiting; a thread that is interrupted aborts its
    request. Within an event loop use `Engine`, since every call here blocks the loop.
    """

    def __init__(
        self,
        model: str | Path | ModelSource | None = None,
        *,
        config: EngineConfig | None = None,
        progress: Progress | None = None,
        **overrides: Any,
    ) -> None:
        self._engine = Engine(model, config=config, progress=progress, **overrides)
        self._loop: EventLoopThread | None = None

    @classmethod
    def open(
        cls,
        model: str | Path | ModelSource | None = None,
        *,
        config: EngineConfig | None = None,
        progress: Progress | None = None,
        **overrides: Any,
    ) -> SyncEngine:
        """An engine that is ready; close it with `close()`. Raises `ModelLoadError`."""
        return cls(model, config=config, progress=progress, **overrides).__enter__()

    def __enter__(self) -> SyncEngine:
        if self._loop is not None:
            raise EngineClosed("an engine is opened once; make another")
        loop = self._loop = EventLoopThread("asyncinfer-sync")
        try:
            loop.run(self._engine.__aenter__)
        except BaseException:
            loop.stop()
            raise
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        self.close(drain_timeout=None if kind is None else 0.0)

    @property
    def engine(self) -> Engine:
        """The engine behind it, for code that runs on an event loop."""
        return self._engine

    @property
    def config(self) -> EngineConfig:
        """The engine's options."""
        return self._engine.config

    @property
    def default_params(self) -> SamplingParams:
        """As `Engine.default_params`."""
        return self._engine.default_params

    @property
    def adapters(self) -> SyncAdapters:
        """The LoRA adapters, as `Engine.adapters`."""
        return SyncAdapters(self._engine.adapters, self._opened())

    def stream(self, prompt: Any, **options: Any) -> SyncStream:
        """A stream of the answer to `prompt`. Options and errors are those of `Engine.stream`."""
        stream = self._engine.stream(prompt, **options)
        return SyncStream(stream, self._opened(), owner=self)

    def session(
        self,
        messages: Sequence[Mapping[str, Any]] = (),
        *,
        system: str | None = None,
        ttl: float | None = None,
        **options: Any,
    ) -> SyncSession:
        """A conversation, as `Engine.session`."""
        session = self._engine.session(messages, system=system, ttl=ttl, **options)
        return SyncSession(session, partial(SyncStream, loop=self._opened(), owner=self))

    @contextmanager
    def pin(self, prompt: Any, **options: Any) -> Iterator[Pin]:
        """As `Engine.pin`."""
        pin = self._engine.pin(prompt, **options)
        with closing(pin):
            yield self._run(pin.__aenter__)

    def generate(self, prompt: Any, **options: Any) -> Completion:
        """The whole answer at once; options as for `stream`."""
        return self.stream(prompt, **options).completion()

    @property
    def tokenizer(self) -> EngineTokenizer:
        """See `Engine.tokenizer`."""
        return self._engine.tokenizer

    @property
    def model(self) -> ModelInfo:
        """See `Engine.model`."""
        return self._engine.model

    def beam_search(self, prompt: Any, *, beams: int, **options: Any) -> Completion:
        """As `Engine.beam_search`. Interrupted, it aborts the search."""
        return self._run(partial(self._engine.beam_search, prompt, beams=beams, **options))

    def best_of(self, prompt: Any, *, candidates: int, **options: Any) -> Completion:
        """As `Engine.best_of`. Interrupted, it aborts the request."""
        return self._run(partial(self._engine.best_of, prompt, candidates=candidates, **options))

    def embed(self, texts: Sequence[Any], **options: Any) -> Embeddings:
        """As `Engine.embed`."""
        return self._run(partial(self._engine.embed, texts, **options))

    def score(self, prompt: Any, continuations: Sequence[Any], **options: Any) -> list[Score]:
        """As `Engine.score`."""
        return self._run(partial(self._engine.score, prompt, continuations, **options))

    def _run(self, work: Callable[[], Awaitable[T]]) -> T:
        return self._opened().run(work)

    def _opened(self) -> EventLoopThread:
        """The loop that does the waiting. There is none where a program has opened the engine
        behind it instead."""
        if self._loop is None:
            raise EngineClosed("the engine is not open; use `with SyncEngine(...)`")
        return self._loop

    def stats(self) -> EngineStats:
        """As `Engine.stats`."""
        return self._engine.stats()

    def health(self) -> EngineHealth:
        """As `Engine.health`."""
        return self._engine.health()

    def close(self, *, drain_timeout: float | None = None) -> None:
        """As `Engine.aclose`. Whoever waits for an answer that does not come any more gets
        `EngineClosed`."""
        loop = self._loop
        if loop is None or not loop.here:
            return
        try:
            loop.run(partial(self._engine.aclose, drain_timeout=drain_timeout))
        except EngineClosed:
            # It was closed before.
            return
        except ValueError:
            raise
        except BaseException:
            loop.stop_soon()
            raise
        loop.stop()


class SyncAdapters(Uncopied):
    """`Adapters` for programs without an event loop; the same names, arguments and errors."""

    def __init__(self, adapters: Adapters, loop: EventLoopThread) -> None:
        self._adapters = adapters
        self._loop = loop

    def load(
        self,
        name: str,
        source: str | os.PathLike[str] | Mapping[str, torch.Tensor],
        *,
        config: Mapping[str, Any] | None = None,
        revision: str | None = None,
    ) -> AdapterInfo:
        """As `Adapters.load`. Interrupted, it leaves nothing behind."""
        load = partial(self._adapters.load, name, source, config=config, revision=revision)
        return self._loop.run(load)

    def unload(self, name: str) -> None:
        """As `Adapters.unload`."""
        self._loop.run(partial(self._adapters.unload, name))

    def list(self) -> tuple[AdapterInfo, ...]:
        """As `Adapters.list`."""
        return self._adapters.list()
