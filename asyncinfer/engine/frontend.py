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
from asyncinfer.engine.loop_bridge import LoopBridge, Waiter, send_news
from asyncinfer.engine.options import RequestOptions
from asyncinfer.engine.request import Request
from asyncinfer.engine.source import Loaded
from asyncinfer.engine.stream_buffer import Outcome
from asyncinfer.engine.turn_limit import TurnLimits
from asyncinfer.errors import EngineClosed
from asyncinfer.params import SamplingParams
from asyncinfer.runtime import Runtime

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
        """Take requests from now on."""
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
        core = self._opened()
        self.admission.check()
        return core

    @property
    def loaded(self) -> Loaded:
        """What the engine serves, also while it closes and after: an answer that it gave is read
        then. Raises `EngineClosed` before the engine is open, and in a fork."""
        return self._opened().loaded

    def _opened(self) -> Core:
        self.check_process()
        if self.core is None:
            raise EngineClosed(
                "the engine is not open; use `async with`, or `with` for a SyncEngine"
            )
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
        """Wait until the event loop has time for one more request: at once, unless many start
        together."""
        await self._turns.wait(Waiter(self.bridge()))

    def admit(
        self,
        request_id: str,
        prompt: Any,
        params: SamplingParams,
        options: RequestOptions,
        context: Context,
        bridge: LoopBridge,
        submitted: float | None = None,
    ) -> Request:
        """Give a request its place; `prepare` or `prepare_now` comes next. `submitted` is when the
        request was first submitted, in seconds of the clock; None for now. The caller has called
        `check`. Raises `Overloaded`; `InvalidRequest` for an adapter that is not loaded, and where
        the request could never have a place; and what `check` raises."""
        assert self.core is not None
        # A request is not charged for more buffer than its answers can fill.
        most = options.buffer
        if params.max_tokens is not None:
            most = min(most, params.max_tokens * params.n)
        stops, biases = params.stop_token_ids, params.logit_bias
        # The tokens that end an answer are a set, too.
        lists = stops, stops, params.allowed_token_ids, [*biases, *biases.values()]
        others = options.prediction, params.negative_prompt, *lists
        held = submitted_bytes(prompt, most, options.chat, *others)
        adapters = self.core.adapters
        # From here on the adapter is released, whatever is raised.
        adapter = None if options.adapter is None else adapters.acquire(options.adapter)
        request = Request(
            request_id,
            bridge,
            params,
            options,
            self._runtime.clock() if submitted is None else submitted,
            context,
            held,
            adapter,
        )
        try:
            self.admission.enter(request)
        except BaseException:
            if adapter is not None:
                adapter.release()
            raise
        return request

    async def prepare(self, request: Request, prompt: Any) -> None:
        """Prepare a request and hand it to the decode thread. Returns also when the request has
        ended meanwhile, which its buffer tells. Raises `InvalidRequest` and `Overloaded`. The
        request is gone after an error and after a cancellation."""
        assert self._intake is not None
        scope = anyio.current_effective_deadline()
        until = math.inf if request.deadline is None else request.deadline
        if not math.isinf(scope):
            until = min(until, request.submitted + scope - anyio.current_time())
        await self._intake.take_in(request, prompt, None if math.isinf(until) else until)

    def prepare_now(self, request: Request, prompt: Any) -> None:
        """`prepare` on the spot, however long it takes."""
        assert self._intake is not None
        self._intake.prepare_here(request, prompt, request.deadline)

    def post(self, command: Command, argument: Any) -> None:
        """Hand the decode thread a command. Never blocks, never raises; finalizers may call it."""
        if self.core is not None:
            self.core.post(command, argument)

    def abort(self, request: Request) -> None:
        """Abort a request whose consumer left. Does nothing in a fork, where a lock may stay held
        by a thread that is gone."""
        if not self.here:
            return
        outcome = self.admission.withdraw(request)
        if outcome is None:
            self.post(Command.ABORT, request)
        else:
            send_news([(request.buffer, outcome)])
            self.admission.told((request,))

    def drain(self, seconds: float) -> None:
        """Refuse new requests and those that are being prepared; the others have `seconds`."""
        withdrawn: dict[Request, Outcome] = {}
        for request in self.admission.drain(self._runtime.clock() + seconds):
            outcome = self.admission.withdraw(request, EngineClosed("the engine is closing"))
            if outcome is not None:
                withdrawn[request] = outcome
        send_news((request.buffer, outcome) for request, outcome in withdrawn.items())
        self.admission.told(withdrawn)
        if self.core is not None:
            self.core.adapters.refuse_loads(lambda: EngineClosed("the engine is closing"))
        self.post(Command.CLOSE, seconds)

    @property
    def preparing(self) -> bool:
        """Whether a worker runs."""
        return self._intake is not None and self._intake.alive

    def forget(self) -> None:
        """Close what nobody waits for. Takes no lock: finalizers may call it."""
        self.dismiss()
        self.post(Command.CLOSE, 0.0)

    def dismiss(self) -> None:
        """Let the workers end. Waits for nothing; finalizers may call it."""
        if self._intake is not None:
            self._intake.close()
