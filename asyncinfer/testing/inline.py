"""`InlineEngine`: an engine without threads or event loops, stepped by hand.

For simulations: the same intake, core, scheduler, cache and output as `Engine`, with time and
turns in the caller's hands.
"""

from __future__ import annotations

import contextvars
from collections.abc import Awaitable, Callable
from typing import Any

from asyncinfer.cache import Conversation
from asyncinfer.chunk import Chunk
from asyncinfer.config import EngineConfig
from asyncinfer.engine import ModelSource
from asyncinfer.engine.admission import Admission
from asyncinfer.engine.assemble import open_scheduler
from asyncinfer.engine.core import Core
from asyncinfer.engine.draft import open_draft
from asyncinfer.engine.frontend import Frontend
from asyncinfer.engine.inbox import Command
from asyncinfer.engine.loop_bridge import LoopBridge, Waiter
from asyncinfer.engine.options import RequestOptions
from asyncinfer.engine.request import Request
from asyncinfer.engine.transcript import Transcript
from asyncinfer.params import SamplingParams
from asyncinfer.runtime import Handle, Worker
from asyncinfer.stats import EngineStats
from asyncinfer.tools import ChatOptions

__all__ = ["InlineEngine", "InlineStream"]


class InlineEngine:
    """Every method is synchronous, and nothing happens except in `pump`.

    `now` is the engine's clock, in seconds: write it to let time pass.
    """

    def __init__(
        self, model: ModelSource, *, config: EngineConfig | None = None, **overrides: Any
    ) -> None:
        self.config = (config or EngineConfig()).replace(**overrides)
        if self.config.observers:
            raise ValueError("observers: an inline engine has no threads to tell them on")
        self.now = 0.0
        draft = open_draft(model, self.config, None)
        loaded = model.load(self.config, None)
        self.scheduler = open_scheduler(loaded, self.config, draft=draft)
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
        prediction: Any = None,
        chat: ChatOptions | None = None,
        conversation: Conversation | None = None,
        **sampling: Any,
    ) -> InlineStream:
        """Like `Engine.stream`, started, as a request of `conversation`. Raises what starting a
        stream raises."""
        params = SamplingParams(**sampling)
        options = RequestOptions(
            priority=priority,
            deadline=deadline,
            cache_scope=cache_scope,
            buffer=self.config.buffer if buffer is None else buffer,
            on_full=on_full or self.config.on_full,
            prediction=prediction,
            chat=chat,
            conversation=conversation,
        )
        frontend = self._frontend
        frontend.check()
        request = frontend.admit(
            frontend.next_request_id(),
            prompt,
            params,
            options,
            contextvars.copy_context(),
            self.bridge,
        )
        frontend.prepare_now(request, prompt)
        return InlineStream(frontend, request, params)

    def pump(self, turns: int = 1) -> None:
        """Run `turns` turns of the decode loop."""
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
    """The consumer's side of one inline request. Answers to chats are read as `Stream` reads
    them."""

    def __init__(self, frontend: Frontend, request: Request, params: SamplingParams) -> None:
        self._frontend = frontend
        self.request = request
        self.chunks: list[Chunk] = []
        self._transcript = Transcript(params.n, params.json_reader)
        if request.message is not None:
            self._transcript.read_messages(request.message)

    def read(self, most: int | None = None) -> list[Chunk]:
        """Take up to `most` chunks (None: all there are), as a consumer would."""
        buffer = self.request.buffer
        taken: list[Chunk] = []
        while buffer.chunks and (most is None or len(taken) < most):
            chunk = buffer.take()
            self._transcript.add(chunk)
            taken.append(self._transcript.readable(chunk))
        if buffer.paused and self.request.drained:
            buffer.paused = False
            self._frontend.post(Command.RESUME, self.request)
        self.chunks += taken
        return taken

    def abort(self) -> None:
        self._frontend.abort(self.request)

    def stop(self) -> None:
        self._frontend.post(Command.STOP, self.request)

    @property
    def ended(self) -> bool:
        """Whether every chunk was read and the end is known."""
        return self.request.buffer.outcome is not None and not self.request.buffer.chunks

    @property
    def error(self) -> BaseException | None:
        outcome = self.request.buffer.outcome
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

    def begin_wait(self, waiter: Waiter) -> Awaitable[object] | None:
        raise AssertionError("nobody waits inline")

    def wake(self, waiter: Waiter) -> None:
        pass

    async def checkpoint(self) -> None:
        pass
