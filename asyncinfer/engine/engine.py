"""`Engine`: the object applications hold."""

from __future__ import annotations

import dataclasses
import math
import os
import time
import warnings
from functools import partial
from itertools import count
from pathlib import Path
from types import TracebackType
from typing import Any

import anyio

from asyncinfer.chunk import Completion, EngineStats
from asyncinfer.config import EngineConfig, OnFull
from asyncinfer.engine import process
from asyncinfer.engine.admission import Admission
from asyncinfer.engine.assemble import open_core, source_of
from asyncinfer.engine.core import Command, Core
from asyncinfer.engine.intake import Intake
from asyncinfer.engine.job import Job
from asyncinfer.engine.loops import current_port
from asyncinfer.engine.mailbox import Outcome
from asyncinfer.engine.options import RequestOptions
from asyncinfer.engine.ports import Port
from asyncinfer.engine.source import ModelSource, Progress
from asyncinfer.engine.stream import Stream
from asyncinfer.engine.thread import DecodeThread
from asyncinfer.errors import EngineClosed, EngineDead, InvalidRequest
from asyncinfer.params import SamplingParams

__all__ = ["Engine"]

#: Seconds beyond `drain_timeout` that a close waits for the step that runs.
CLOSE_GRACE = 10.0

_SAMPLING = frozenset(field.name for field in dataclasses.fields(SamplingParams))


class Engine:
    """An LLM in this process, to be awaited.

    `Engine(model)` takes a local folder or a hub id in the Hugging Face format; without one it is
    the small model shipped with the package. Options are those of `EngineConfig`, as `config=` or
    by name. Use it as an async context manager, or `await Engine.open(...)` and `aclose()`.

    Requests may come from any event loop (asyncio, uvloop, trio) and thread.
    """

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
        self._admission = Admission(self.config.max_requests)
        self._ports: dict[object, Port] = {}
        self._thread: DecodeThread | None = None
        self._core: Core | None = None
        self._intake: Intake | None = None
        self._process = process.pid
        self._ids = count(1)

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
        what is not named is the model's own default (its generation_config.json). Raises
        `InvalidRequest` for bad options here, and for a bad prompt when the stream starts.
        """
        core = self._check()
        options = RequestOptions(
            priority=priority,
            deadline=deadline,
            cache_scope=cache_scope,
            buffer=self.config.buffer if buffer is None else buffer,
            on_full=self.config.on_full if on_full is None else on_full,
        )
        for name in sampling.keys() - _SAMPLING:
            raise InvalidRequest(name, sampling[name], "is not an option of stream()")
        if params is None:
            params = SamplingParams(**{**core.loaded.defaults, **sampling})
        elif not isinstance(params, SamplingParams):
            raise InvalidRequest("params", params, "must be SamplingParams")
        elif sampling:
            params = dataclasses.replace(params, **sampling)
        if params.n > self.config.max_requests:
            # `Overloaded` would say "later", and there is no later for this one.
            raise InvalidRequest(
                "n", params.n, f"must be <= max_requests={self.config.max_requests}"
            )
        return Stream(self, prompt, params, options)

    async def generate(self, prompt: Any, **options: Any) -> Completion:
        """The whole answer at once; options as for `stream`. Cancelling it aborts the request."""
        return await self.stream(prompt, **options)

    def stats(self) -> EngineStats:
        """A snapshot of the counters, from any thread, without waiting."""
        return EngineStats() if self._core is None else self._core.stats

    async def aclose(self, *, drain_timeout: float | None = None) -> None:
        """Refuse new requests, let running ones go on for `drain_timeout` seconds (None takes the
        configuration's, 0 aborts them), and give all memory back. A second call does nothing.

        Raises `EngineDead` if the decode thread hangs in a step, `ValueError` for a bad
        `drain_timeout`; never hangs itself.
        """
        thread = self._thread
        if thread is None or not self._in_process():
            return
        config = self.config
        if drain_timeout is not None:
            config = config.replace(drain_timeout=drain_timeout)
        drain = config.drain_timeout
        self._post(Command.CLOSE, drain)
        with anyio.move_on_after(drain + CLOSE_GRACE, shield=True):
            await thread.closed.wait(current_port(self._ports))
        if self._intake is not None:
            self._intake.close()
        # The thread has said its last word; what is left of it takes no time.
        if not thread.closed.is_set or not thread.join(timeout=1.0):
            raise EngineDead(f"the decode thread did not stop within {drain + CLOSE_GRACE:g} s")

    async def _open(self) -> None:
        if self._thread is not None:
            raise EngineClosed("an engine is opened once; make another")
        port = current_port(self._ports)
        thread = self._thread = DecodeThread(
            partial(
                open_core,
                self._source,
                self.config,
                self._progress,
                self._admission,
                self._ports,
            ),
            home=port,
            step_timeout=self.config.step_timeout,
        )
        thread.start()
        try:
            await thread.opened.wait(port)
        except BaseException:
            # The thread stops at the next tensor, gives back what it has, and is nobody's.
            thread.cancel_open()
            self._thread = None
            raise
        if thread.load_error is not None:
            raise thread.load_error
        assert thread.core is not None
        self._core = thread.core
        self._intake = Intake(thread.core, self.config)

    async def _submit(self, stream: Stream, *, quiet: bool) -> Job:
        """Turn a stream into a job and hand it to the decode thread. `quiet`: nothing is read
        before the end."""
        core = self._check()
        assert self._intake is not None
        now = time.monotonic()
        port = current_port(self._ports)
        options, params = stream._options, stream._params
        job = Job(stream.request_id, port, params, options, now, stream._context)
        # Before the engine has it: the buffer of one that is awaited is never full.
        job.mailbox.quiet = quiet
        self._admission.enter(params.n)
        try:
            hint = min(job.deadline or math.inf, now + _scope_deadline())
            await self._intake.fill(
                job, stream._prompt, options, None if hint == math.inf else hint
            )
            self._check()
        except BaseException:
            self._admission.leave(params.n)
            raise
        core.post(Command.SUBMIT, job)
        assert self._thread is not None
        if self._thread.ended is not None:
            # Posted while the thread read its inbox for the last time: nobody else may answer.
            job.mailbox.tell(Outcome(self._thread.ended()))
        return job

    def _check(self) -> Core:
        """The open core, or the error that says why there is none."""
        self._check_process()
        if self._core is None or self._thread is None:
            raise EngineClosed("the engine is not open; use `async with Engine(...)`")
        if self._thread.ended is not None:
            raise self._thread.ended()
        if self._core.drain_until is not None:
            raise EngineClosed("the engine is closing")
        return self._core

    def _check_process(self) -> None:
        if not self._in_process():
            raise EngineClosed(
                f"this engine lives in process {self._process}, not in its fork {os.getpid()}; "
                "open another one here"
            )

    def _in_process(self) -> bool:
        return process.pid == self._process

    def _post(self, command: Command, argument: Any) -> None:
        if self._core is not None:
            self._core.post(command, argument)

    def _next_request_id(self) -> str:
        return f"req-{next(self._ids)}"

    def __del__(self) -> None:
        thread = getattr(self, "_thread", None)
        if thread is None or not self._in_process():
            return
        if self._intake is not None:
            self._intake.dismiss()
        if thread.closed.is_set:
            return
        self._post(Command.CLOSE, 0.0)
        warnings.warn(
            "an Engine was dropped without aclose(); use `async with Engine(...)`",
            ResourceWarning,
            source=self,
            stacklevel=2,
        )


def _scope_deadline() -> float:
    """Seconds until the cancel scopes around the caller expire; inf without one."""
    deadline = anyio.current_effective_deadline()
    return deadline if math.isinf(deadline) else deadline - anyio.current_time()
