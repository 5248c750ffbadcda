"""`InlineEngine`: an engine without threads or event loops, stepped by hand.

For simulations: the same intake, core, scheduler, cache and output as `Engine`, with time and
turns in the caller's hands.
"""

from __future__ import annotations

import contextvars
from collections.abc import Callable
from typing import Any

from asyncinfer.chunk import Chunk, EngineStats
from asyncinfer.config import EngineConfig
from asyncinfer.engine import ModelSource
from asyncinfer.engine.admission import Admission
from asyncinfer.engine.assemble import open_scheduler
from asyncinfer.engine.core import Core
from asyncinfer.engine.frontend import Frontend
from asyncinfer.engine.inbox import Command
from asyncinfer.engine.job import Job
from asyncinfer.engine.loop_bridge import LoopBridge, Waiter
from asyncinfer.engine.options import RequestOptions
from asyncinfer.engine.runtime import Handle, Worker
from asyncinfer.params import SamplingParams

__all__ = ["InlineEngine", "InlineStream"]


class InlineEngine:
    """Every method is synchronous; nothing happens but in `pump`.

    `now` is the engine's clock, in seconds: write it to let time pass.
    """

    def __init__(
        self, model: ModelSource, *, config: EngineConfig | None = None, **overrides: Any
    ) -> None:
        self.config = (config or EngineConfig()).replace(**overrides)
        if self.config.observers:
            raise ValueError("observers: an inline engine has no threads to tell them on")
        self.now = 0.0
        loaded = model.load(self.config, None)
        self.scheduler = open_scheduler(loaded, self.config)
        self.bridge = _InlineBridge()
        clock = _InlineRuntime(self)
        self.admission = Admission(
            self.config.max_requests, self.config.max_held_bytes, clock.clock
        )
        self._frontend = Frontend(self.config, self.admission, clock)
        self._frontend.bridges[None] = self.bridge
        self.core = Core(
            loaded,
            self.scheduler,
            self.config,
            self.admission,
            self._frontend.bridges,
            clock=clock.clock,
        )
        self._frontend.opened(self.core)

    def submit(
        self,
        prompt: Any,
        *,
        priority: int = 0,
        deadline: float | None = None,
        cache_scope: str = "",
        buffer: int | None = None,
        on_full: Any = None,
        **sampling: Any,
    ) -> InlineStream:
        """Like `Engine.stream`, started. Raises what starting a stream raises."""
        params = SamplingParams(**sampling)
        options = RequestOptions(
            priority=priority,
            deadline=deadline,
            cache_scope=cache_scope,
            buffer=self.config.buffer if buffer is None else buffer,
            on_full=on_full or self.config.on_full,
        )
        frontend = self._frontend
        frontend.check()
        job = frontend.admit(
            frontend.next_request_id(),
            prompt,
            params,
            options,
            contextvars.copy_context(),
            self.bridge,
        )
        frontend.prepare_now(job, prompt, options)
        return InlineStream(frontend, job)

    def pump(self, turns: int = 1) -> None:
        """So many turns of the decode loop."""
        for _ in range(turns):
            self.core.step()

    def run(self, *, most: int = 100_000) -> None:
        """Pump until nothing can be computed. Paused streams stay paused."""
        for _ in range(most):
            self.core.step()
            if not self.core.busy and self.core.inbox.empty():
                return
        raise AssertionError(f"still busy after {most} turns")

    def stats(self) -> EngineStats:
        return self.core.snapshot()


class InlineStream:
    """The consumer's side of one inline request."""

    def __init__(self, frontend: Frontend, job: Job) -> None:
        self._frontend = frontend
        self.job = job
        self.chunks: list[Chunk] = []

    def read(self, most: int | None = None) -> list[Chunk]:
        """Take up to `most` chunks (None: all there are), as a consumer would."""
        buffer = self.job.buffer
        taken: list[Chunk] = []
        while buffer.chunks and (most is None or len(taken) < most):
            taken.append(buffer.take())
        if buffer.paused and self.job.drained:
            buffer.paused = False
            self._frontend.post(Command.RESUME, self.job)
        self.chunks += taken
        return taken

    def abort(self) -> None:
        self._frontend.abort(self.job)

    def stop(self) -> None:
        self._frontend.post(Command.STOP, self.job)

    @property
    def ended(self) -> bool:
        """Every chunk was read and the end is known."""
        return self.job.buffer.outcome is not None and not self.job.buffer.chunks

    @property
    def error(self) -> BaseException | None:
        outcome = self.job.buffer.outcome
        return None if outcome is None else outcome.error

    def text(self, index: int = 0) -> str:
        return "".join(chunk.text for chunk in self.chunks if chunk.index == index)

    def token_ids(self, index: int = 0) -> list[int]:
        return [token for chunk in self.chunks if chunk.index == index for token in chunk.token_ids]


class _InlineRuntime:
    """The engine's own time, and no threads."""

    def __init__(self, engine: InlineEngine) -> None:
        self._engine = engine

    def clock(self) -> float:
        return self._engine.now

    def start(self, worker: Worker) -> Handle:
        raise RuntimeError(f"{worker.name}: an inline engine has no threads")


class _InlineBridge(LoopBridge):
    """A loop that runs what is posted on the spot."""

    def post(self, function: Callable[..., object], *args: Any) -> None:
        function(*args)

    def soon(self, function: Callable[..., object], *args: Any) -> None:
        function(*args)

    def probe(self) -> bool:
        return True

    def here(self) -> bool:
        return True

    def prepare_wait(self, waiter: Waiter) -> bool:
        raise AssertionError("nobody waits inline")

    async def wait(self, waiter: Waiter) -> None:
        raise AssertionError("nobody waits inline")

    def wake(self, waiter: Waiter) -> None:
        pass

    async def checkpoint(self) -> None:
        pass
