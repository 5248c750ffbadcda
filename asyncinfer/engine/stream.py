"""`Stream`: one request as its consumer sees it."""

from __future__ import annotations

import contextvars
import os
import warnings
from collections.abc import Generator
from types import TracebackType
from typing import Any

import anyio

from asyncinfer.chunk import Chunk, Completion, Timings, Usage
from asyncinfer.engine import process
from asyncinfer.engine.frontend import Frontend
from asyncinfer.engine.inbox import Command
from asyncinfer.engine.job import Job
from asyncinfer.engine.loop_bridge import LoopBridge
from asyncinfer.engine.options import RequestOptions
from asyncinfer.engine.stream_buffer import StreamBuffer
from asyncinfer.engine.transcript import Transcript
from asyncinfer.errors import EngineClosed, StreamBusy
from asyncinfer.params import SamplingParams

__all__ = ["Stream"]

#: Seconds that `aclose` waits for the engine to confirm; its pages are released either way. The
#: second is for a task that is cancelled, or whose time has run out.
ACK_TIMEOUT = 5.0
LAST_MOMENT = 0.02
#: Chunks read without a pause before other tasks get a turn.
BURST = 32


class Stream:
    """An answer as it is generated: async iterator of `Chunk`, async context manager, awaitable.

    Made by `Engine.stream()`; it costs nothing until it is entered, iterated or awaited. A class
    and not an async generator: a cancelled `__anext__` loses nothing, and iteration can go on.
    It belongs to the event loop that starts it, and one task reads it at a time.
    """

    def __init__(
        self,
        frontend: Frontend,
        prompt: Any,
        params: SamplingParams,
        options: RequestOptions,
        owner: object = None,
    ) -> None:
        """`owner` is kept alive as long as the stream: an engine that is dropped is closed."""
        self.request_id = frontend.next_request_id()
        self._frontend = frontend
        self._owner = owner
        self._prompt = prompt
        self._params = params
        self._options = options
        self._context = contextvars.copy_context()
        self._job: Job | None = None
        #: The job's, which is the decode thread's to write to, token by token.
        self._buffer: StreamBuffer | None = None
        self._transcript = Transcript(params.n)
        self._reading = False
        self._burst = 0
        self._stopped = False
        self._closed = False
        #: Set when the task that waits for the end stops waiting; None if none does.
        self._waited: anyio.Event | None = None

    def __aiter__(self) -> Stream:
        return self

    async def __anext__(self) -> Chunk:
        # Runs for every token: what would be a call each is written out here.
        if self._reading:
            raise self._busy()
        self._reading = True
        try:
            buffer = self._buffer or (await self._start()).buffer
            chunks = buffer.chunks
            if chunks and not self._closed:
                if not buffer.bridge.here():
                    raise self._elsewhere()
                self._burst += 1
                if self._burst >= BURST:
                    # Cancellation is looked at before the pop, and nothing is awaited after.
                    self._burst = 0
                    await buffer.bridge.checkpoint()
                    if self._closed:
                        raise self._end()
            else:
                self._burst = 0
                # `buffer.wait_for(news)`, without the frames of it.
                while not chunks or self._closed:
                    if self._closed or buffer.outcome is not None:
                        # An end may have left what there is in another queue.
                        if self._closed or not buffer.chunks:
                            raise self._end()
                        break
                    if process.pid != self._frontend.process:
                        self._frontend.check_process()
                    if not buffer.bridge.prepare_wait(buffer):
                        raise self._elsewhere()
                    try:
                        await buffer.bridge.wait(buffer)
                    finally:
                        buffer.waiting = None
            chunk = buffer.take()
            if buffer.paused:
                self._go_on()
            self._transcript.add(chunk)
            return chunk
        finally:
            self._reading = False

    def __await__(self) -> Generator[Any, Any, Completion]:
        return self._complete().__await__()

    async def __aenter__(self) -> Stream:
        self._claim()
        try:
            if self._job is None:
                await self._start()
        finally:
            self._reading = False
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        await self.aclose()

    @property
    def usage(self) -> Usage | None:
        """Tokens taken, once the stream has ended."""
        outcome = self._job.buffer.outcome if self._job else None
        return outcome.usage if outcome else None

    @property
    def timings(self) -> Timings | None:
        """Times taken, once the stream has ended."""
        outcome = self._job.buffer.outcome if self._job else None
        return outcome.timings if outcome else None

    def stop(self) -> None:
        """End the answer politely: what was generated stays readable and the last chunk says
        `finish_reason="stopped"`. Callable from any thread; a second call does nothing."""
        if not self._stopped:
            self._stopped = True
            if self._buffer is not None:
                self._frontend.post(Command.STOP, self._job)

    async def aclose(self) -> None:
        """Abort: the request's pages are free within a step. A second call does nothing."""
        self._closed = True
        job = self._job
        if job is None or job.buffer.outcome is not None:
            return
        self._frontend.abort(job)
        buffer = job.buffer
        # A task that reads is told of the end itself, and only one can wait on a buffer.
        if not self._reading and buffer.bridge.here() and self._frontend.here:
            with anyio.move_on_after(_patience(buffer.bridge), shield=True):
                await self._wait_for_end(buffer)

    async def _start(self, *, quiet: bool = False) -> Job:
        """Validate, tokenise, submit. `quiet`: nothing is read before the end."""
        if self._closed:
            raise EngineClosed(f"{self.request_id}: the stream was closed before it began")
        frontend = self._frontend
        frontend.check()
        job = self._job = frontend.admit(
            self.request_id,
            self._prompt,
            self._params,
            self._options,
            self._context,
            frontend.bridge(),
        )
        # Before the engine has it: the buffer of one that is awaited is never full.
        job.buffer.quiet = quiet
        try:
            await frontend.prepare(job, self._prompt, self._options)
        except BaseException:
            # Gone; the stream may be started again.
            self._job = None
            raise
        self._buffer = job.buffer
        self._catch_up(job)
        return job

    def _catch_up(self, job: Job) -> None:
        """Whoever closed or stopped the stream while its prompt was prepared may have found nothing
        to end."""
        if self._closed:
            self._frontend.abort(job)
        elif self._stopped:
            self._frontend.post(Command.STOP, job)

    def _go_on(self) -> None:
        """Tell the engine, which waits for it, that there is room again, if there is."""
        assert self._job is not None
        if self._job.drained:
            self._job.buffer.paused = False
            self._frontend.post(Command.RESUME, self._job)

    async def _complete(self) -> Completion:
        self._claim()
        try:
            job = self._job or await self._start(quiet=True)
            buffer = job.buffer
            if not buffer.bridge.here():
                raise self._elsewhere()
            buffer.quiet = True
            if buffer.paused:
                self._go_on()
            self._frontend.check_process()
            await self._wait_for_end(buffer)
            outcome = buffer.outcome
            assert outcome is not None
            if outcome.error is not None:
                raise outcome.raised()
            while buffer.chunks:
                self._transcript.add(buffer.take_packed())
            return await self._transcript.completion(self.request_id, buffer, outcome)
        finally:
            self._reading = False
            if self._job is not None and self._job.buffer.outcome is None:
                # Cancelled: nobody else holds an answer that was awaited.
                self._closed = True
                self._frontend.abort(self._job)

    async def _wait_for_end(self, buffer: StreamBuffer) -> None:
        """Several tasks may: one of them at the buffer, the others for that one."""
        while buffer.outcome is None:
            if self._waited is not None:
                await self._waited.wait()
                continue
            waited = self._waited = anyio.Event()
            try:
                await buffer.wait_for(lambda: buffer.outcome is not None)
            finally:
                self._waited = None
                waited.set()

    def _end(self) -> BaseException:
        """What a reader is told when there is nothing more to read."""
        outcome = self._job.buffer.outcome if self._job else None
        if outcome is None or outcome.error is None:
            return StopAsyncIteration()
        return outcome.raised()

    def _claim(self) -> None:
        if self._reading:
            raise self._busy()
        self._reading = True

    def _busy(self) -> StreamBusy:
        return StreamBusy(f"{self.request_id}: another task is reading this stream")

    def _elsewhere(self) -> StreamBusy:
        return StreamBusy(f"{self.request_id}: belongs to another event loop")

    def __del__(self) -> None:
        # Runs on any thread at any point: it may do no more than append to a queue.
        job = getattr(self, "_job", None)
        if job is None or job.buffer.outcome is not None or self._closed:
            return
        if self._frontend.here:
            self._frontend.post(Command.ABORT, job)
            warnings.warn(
                f"{self.request_id} was dropped before its end; use `async with`",
                ResourceWarning,
                source=self,
                stacklevel=2,
            )

    def __repr__(self) -> str:
        state = "new" if self._job is None else "open"
        if self._closed or (self._job is not None and self._job.buffer.outcome is not None):
            state = "ended"
        return f"<asyncinfer.Stream {self.request_id} {state} pid={os.getpid()}>"


def _patience(bridge: LoopBridge) -> float:
    """Seconds that the current task may be kept from leaving."""
    left = anyio.current_effective_deadline() - anyio.current_time()
    return LAST_MOMENT if bridge.cancelled() else max(LAST_MOMENT, min(ACK_TIMEOUT, left))
