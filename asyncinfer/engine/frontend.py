"""`Frontend`: the way into an engine, for `Engine`, `Stream` and the inline engine alike."""

from __future__ import annotations

import math
import os
from contextvars import Context
from itertools import count
from typing import Any

import anyio

from asyncinfer.config import EngineConfig
from asyncinfer.engine import process
from asyncinfer.engine.admission import Admission
from asyncinfer.engine.core import Core
from asyncinfer.engine.event_loops import current_bridge
from asyncinfer.engine.footprint import submitted_bytes
from asyncinfer.engine.inbox import Command
from asyncinfer.engine.intake import Intake
from asyncinfer.engine.job import Job
from asyncinfer.engine.loop_bridge import Batch, LoopBridge, Waiter
from asyncinfer.engine.options import RequestOptions
from asyncinfer.engine.runtime import Runtime
from asyncinfer.engine.turn_limit import TurnLimits
from asyncinfer.errors import EngineClosed
from asyncinfer.params import SamplingParams

__all__ = ["Frontend"]


class Frontend:
    """Takes requests in and commands to the decode thread. Callable from any thread."""

    def __init__(self, config: EngineConfig, admission: Admission, runtime: Runtime) -> None:
        self.config = config
        self.admission = admission
        #: One per event loop that the engine was used on; the decode thread takes closed ones out.
        self.bridges: dict[object, LoopBridge] = {}
        #: None until the engine is open.
        self.core: Core | None = None
        #: The process that the engine belongs to.
        self.process = process.pid
        self._runtime = runtime
        self._intake: Intake | None = None
        self._ids = count(1)
        self._turns = TurnLimits()

    def opened(self, core: Core) -> None:
        """Requests are taken from now on."""
        self.core = core
        self._intake = Intake(core, self.config, self.admission, self._runtime)

    @property
    def here(self) -> bool:
        """Whether this is the process of the engine, and not a fork of it."""
        return process.pid == self.process

    def bridge(self) -> LoopBridge:
        """The running event loop. Raises `RuntimeError` outside one."""
        return current_bridge(self.bridges)

    def check(self) -> Core:
        """The open core. Raises `EngineClosed` or `EngineDead` if there is none."""
        self.check_process()
        if self.core is None:
            raise EngineClosed("the engine is not open; use `async with Engine(...)`")
        self.admission.check()
        return self.core

    def check_process(self) -> None:
        """Raises `EngineClosed` in a fork."""
        if not self.here:
            raise EngineClosed(
                f"this engine lives in process {self.process}, not in its fork {os.getpid()}; "
                "open another one here"
            )

    def next_request_id(self) -> str:
        return f"req-{next(self._ids)}"

    async def turn(self) -> None:
        """Wait until the event loop has time for one more request, as it has at once unless a crowd
        comes together."""
        await self._turns.wait(Waiter(self.bridge()))

    def admit(
        self,
        request_id: str,
        prompt: Any,
        params: SamplingParams,
        options: RequestOptions,
        context: Context,
        bridge: LoopBridge,
    ) -> Job:
        """Give a request its place; `prepare` or `prepare_now` comes next. Raises `Overloaded`,
        `InvalidRequest` where it could never have a place, and what `check` does, which was
        called."""
        # A buffer larger than the answers can be is never filled.
        most = options.buffer
        if params.max_tokens is not None:
            most = min(most, params.max_tokens * params.n)
        job = Job(
            request_id,
            bridge,
            params,
            options,
            self._runtime.clock(),
            context,
            submitted_bytes(prompt, most),
        )
        self.admission.enter(job)
        return job

    async def prepare(self, job: Job, prompt: Any, options: RequestOptions) -> None:
        """Hand a request with its prompt to the decode thread. Returns also when the request was
        aborted meanwhile. Raises `InvalidRequest`, and what the request ended with; then, and when
        it is cancelled, the request is gone."""
        assert self._intake is not None
        scope = anyio.current_effective_deadline()
        hint = math.inf if job.deadline is None else job.deadline
        if not math.isinf(scope):
            hint = min(hint, job.submitted + scope - anyio.current_time())
        await self._intake.take_in(job, prompt, options, None if math.isinf(hint) else hint)

    def prepare_now(self, job: Job, prompt: Any, options: RequestOptions) -> None:
        """`prepare` on the spot, however long it takes."""
        assert self._intake is not None
        self._intake.prepare_here(job, prompt, options, job.deadline)

    def post(self, command: Command, argument: Any) -> None:
        """Ask the decode thread for something. Never blocks, never raises; finalizers may."""
        if self.core is not None:
            self.core.post(command, argument)

    def abort(self, job: Job) -> None:
        """The consumer left. Does nothing in a fork: a lock may be held there by nobody."""
        if not self.here:
            return
        outcome = self.admission.withdraw(job)
        if outcome is None:
            self.post(Command.ABORT, job)
        else:
            job.buffer.bridge.send(Batch((job.buffer, outcome)))
            self.admission.told((job,))

    def drain(self, seconds: float) -> None:
        """Refuse new requests and those that are being prepared; the others have `seconds`."""
        for job in self.admission.drain(self._runtime.clock() + seconds):
            outcome = self.admission.withdraw(job, EngineClosed("the engine is closing"))
            if outcome is not None:
                job.buffer.bridge.send(Batch((job.buffer, outcome)))
                self.admission.told((job,))
        self.post(Command.CLOSE, seconds)

    @property
    def preparing(self) -> bool:
        """Whether a worker runs."""
        return self._intake is not None and self._intake.alive

    def dismiss(self) -> None:
        """Let the workers end. Waits for nothing; finalizers may call it."""
        if self._intake is not None:
            self._intake.close()
