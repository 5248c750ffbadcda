"""`Stream`: one request as its consumer sees it."""

from __future__ import annotations

import contextvars
import os
import warnings
from collections.abc import Generator
from typing import Any

from asyncinfer.chunk import Chunk, Completion, Timings, Usage
from asyncinfer.engine import process
from asyncinfer.engine.frontend import Frontend
from asyncinfer.engine.inbox import Command
from asyncinfer.engine.options import RequestOptions
from asyncinfer.engine.request import Request
from asyncinfer.engine.stream_buffer import StreamBuffer
from asyncinfer.engine.transcript import Transcript
from asyncinfer.engine.uncopied import Uncopied
from asyncinfer.errors import EngineClosed, StreamBusy
from asyncinfer.params import SamplingParams

__all__ = ["Stream"]

#: Chunks read without a pause before other tasks get a turn.
BURST = 32


class Stream(Uncopied):
    """An answer as it is generated: async iterator of `Chunk`, async context manager, awaitable.

    Made by `Engine.stream()`; costs nothing until it is entered, iterated or awaited. A cancelled
    `__anext__` loses nothing. It belongs to the loop that starts it; one task reads it at a time.
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
        self._id = self.request_id = frontend.next_request_id()
        self._frontend = frontend
        self._owner = owner
        self._prompt = prompt
        self._params = params
        self._options = options
        self._context = contextvars.copy_context()
        self._request: Request | None = None
        #: Requests made so far: more than one where a start was cancelled.
        self._runs = 0
        #: The request's buffer, once the decode thread may write to it.
        self._buffer: StreamBuffer | None = None
        #: When the stream was first started, from which its deadline counts, also if that start was
        #: cancelled and another follows. None before.
        self._submitted: float | None = None
        self._transcript = Transcript(params.n, params.json_reader)
        self._plain = params.json_reader is None
        self._reading = False
        self._burst = 0
        self._stopped = False
        self._closed = False

    def __aiter__(self) -> Stream:
        return self

    async def __anext__(self) -> Chunk:
        # Runs for every token, so helpers are written out here.
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
                # `StreamBuffer.wait_for`, written out.
                while not chunks or self._closed:
                    if self._closed or buffer.outcome is not None:
                        # The end may have replaced `buffer.chunks` by another queue.
                        if self._closed or not buffer.chunks:
                            raise self._end()
                        break
                    if process.pid != self._frontend.process:
                        self._frontend.check_process()
                    news = buffer.bridge.begin_wait(buffer)
                    if news is None:
                        raise self._elsewhere()
                    try:
                        await news
                    finally:
                        buffer.waiting = news = None
            chunk = buffer.take()
            if buffer.paused:
                self._resume()
            self._transcript.add(chunk)
            return chunk if self._plain else self._transcript.readable(chunk)
        finally:
            self._reading = False

    def __await__(self) -> Generator[Any, Any, Completion]:
        return self._complete().__await__()

    async def __aenter__(self) -> Stream:
        self._claim()
        try:
            buffer = (self._request or await self._start()).buffer
            if buffer.failed and not buffer.chunks:
                raise self._end()
        finally:
            self._reading = False
        return self

    async def __aexit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if kind is GeneratorExit:
            # The task's coroutine is closed, perhaps by a finalizer: nothing can be awaited.
            self._forget()
        else:
            await self.aclose()

    @property
    def ready(self) -> bool:
        """Whether the next chunk or the end is there already, so that reading does not wait."""
        return self._buffer is not None and self._buffer.ready

    @property
    def prompt_tokens(self) -> int | None:
        """Tokens of the prompt, once the stream has begun."""
        return self._request.prompt_len if self._request else None

    @property
    def usage(self) -> Usage | None:
        """Tokens taken, once the stream has ended."""
        outcome = self._request.buffer.outcome if self._request else None
        return self._transcript.usage(outcome.usage) if outcome else None

    @property
    def timings(self) -> Timings | None:
        """Times taken, once the stream has ended."""
        outcome = self._request.buffer.outcome if self._request else None
        return outcome.timings if outcome else None

    def stop(self) -> None:
        """End the answer politely: what was generated stays readable and the last chunk says
        `finish_reason="stopped"`. Callable from any thread; a second call does nothing."""
        if not self._stopped:
            self._stopped = True
            if self._buffer is not None:
                self._frontend.post(Command.STOP, self._request)

    async def aclose(self) -> None:
        """Abort: its pages are free after the steps in flight. A second call does nothing."""
        self._closed = True
        request = self._request
        if request is None or request.buffer.outcome is not None:
            return
        self._frontend.abort(request)
        buffer = request.buffer
        # A reading task notices the end by itself, and only one task can wait on a buffer.
        if not self._reading and buffer.bridge.here() and self._frontend.here:
            await buffer.wait_a_moment()

    async def _start(self, *, quiet: bool = False) -> Request:
        """Validate, tokenise, submit. `quiet`: nothing is read before the end. A request that ended
        meanwhile is returned like any other: a late event loop may hear of all of it at once."""
        if self._closed:
            raise EngineClosed(f"{self.request_id}: the stream was closed before it began")
        frontend = self._frontend
        frontend.check()
        # Observers may hear of the last run's end after this run has begun: each has its own id.
        request_id = f"{self._id}.{self._runs + 1}" if self._runs else self._id
        request = self._request = frontend.admit(
            request_id,
            self._prompt,
            self._params,
            self._options,
            self._context,
            frontend.bridge(),
            self._submitted,
        )
        self._submitted, self.request_id = request.submitted, request_id
        self._runs += 1
        # Set before the decode thread gets the request, which it never pauses when `quiet`.
        request.buffer.quiet = quiet
        try:
            await frontend.prepare(request, self._prompt)
        except BaseException:
            # The request was refused, or is aborted because nobody waits for it. None of it was
            # read, so the stream may be started again.
            self._request = None
            raise
        self._buffer = request.buffer
        if request.message is not None:
            self._transcript.read_messages(request.message)
            self._plain = False
        self._catch_up(request)
        return request

    def _catch_up(self, request: Request) -> None:
        """Pass on a close or a stop that came while the prompt was prepared."""
        if self._closed:
            self._frontend.abort(request)
        elif self._stopped:
            self._frontend.post(Command.STOP, request)

    def _resume(self) -> None:
        """Tell the decode thread if a paused request's buffer has room again."""
        assert self._request is not None
        if self._request.drained:
            self._request.buffer.paused = False
            self._frontend.post(Command.RESUME, self._request)

    async def _complete(self) -> Completion:
        self._claim()
        try:
            request = self._request or await self._start(quiet=True)
            buffer = request.buffer
            if not buffer.bridge.here():
                raise self._elsewhere()
            buffer.quiet = True
            if buffer.paused:
                self._resume()
            self._frontend.check_process()
            await buffer.wait_for_end()
            outcome = buffer.outcome
            assert outcome is not None
            if outcome.error is not None:
                raise outcome.raised()
            while buffer.chunks:
                self._transcript.add(buffer.take_packed())
            return await self._transcript.completion(self.request_id, buffer, outcome)
        except GeneratorExit:
            self._forget()
            raise
        finally:
            self._reading = False
            left = None if self._closed else self._request
            if left is not None and left.buffer.outcome is None:
                # Cancelled: nobody else holds an answer that was awaited.
                self._closed = True
                self._frontend.abort(left)

    def _end(self) -> BaseException:
        """What a reader is told when there is nothing more to read."""
        outcome = self._request.buffer.outcome if self._request else None
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
        self._frontend.check_process()
        return StreamBusy(f"{self.request_id}: belongs to another event loop")

    def _forget(self) -> bool:
        """Abort without a lock, as a finalizer must, which runs on any thread at any point, also
        where that thread holds one. Whether there was anything to abort."""
        closed, self._closed = self._closed, True
        request = self._request
        if closed or request is None or request.buffer.outcome is not None:
            return False
        if self._frontend.here:
            self._frontend.post(Command.ABORT, request)
        return self._frontend.here

    def __del__(self) -> None:
        # One whose constructor raised has no request.
        if hasattr(self, "_request") and self._forget():
            warnings.warn(
                f"{self.request_id} was dropped before its end; close it, as `with` does",
                ResourceWarning,
                source=self,
                stacklevel=2,
            )

    def __repr__(self) -> str:
        state = "new" if self._request is None else "open"
        if self._closed or (self._request is not None and self._request.buffer.outcome is not None):
            state = "ended"
        return f"<asyncinfer.Stream {self.request_id} {state} pid={os.getpid()}>"
