"""`RemoteStream`: an answer that a replica generates, as its consumer sees it."""

from __future__ import annotations

import asyncio
import time
import warnings
from collections import deque
from collections.abc import Coroutine, Generator, Mapping
from typing import Any, Final, TypeVar

from asyncinfer.chunk import Chunk, Completion, Timings, Usage
from asyncinfer.engine import SpokenMessages
from asyncinfer.engine.transcript import AnswerChunk
from asyncinfer.engine.uncopied import Uncopied
from asyncinfer.errors import DeadlineExceeded, EngineClosed, StreamBusy
from asyncinfer.remote.dispatcher import Dispatcher
from asyncinfer.remote.hold import RemoteHold
from asyncinfer.remote.link import Begun, SentChunk, Taken
from asyncinfer.remote.options import time_left
from asyncinfer.remote.router import Route
from asyncinfer.structured_output import AnswerReader
from asyncinfer.tools import MessageDelta

__all__ = ["RemoteStream"]

Result = TypeVar("Result")

#: Seconds that `aclose` waits for the replica's confirmation.
ACK_TIMEOUT: Final = 5.0
#: Seconds after its deadline at which a request is given up if its replica did not end it.
GRACE: Final = 5.0


class RemoteStream(Uncopied):
    """`Stream` on a replica: async iterator of `Chunk`, async context manager, awaitable. It begins
    when it is entered, iterated or awaited, and belongs to one task of asyncio.

    The replica reads ahead as far as the engine's buffer goes. A cancelled `__anext__` loses
    nothing. A lost replica raises `ReplicaLost`, whose cause says why.
    """

    def __init__(
        self,
        dispatcher: Dispatcher,
        request_id: str,
        prompt: Any,
        options: Mapping[str, Any],
        session: str | None,
        reader: AnswerReader | None,
        hold: RemoteHold | None = None,
    ) -> None:
        """`reader` parses answers that are JSON; `hold` keeps the blocks of a session."""
        self._id = self.request_id = request_id
        #: Requests that replicas were asked to begin: more than one where a start was refused.
        self._runs = 0
        self.prompt_tokens: int | None = None
        self.usage: Usage | None = None
        self.timings: Timings | None = None
        self._dispatcher = dispatcher
        self._prompt = prompt
        self._options = dict(options)
        self._session = session
        self._route: Route | None = None
        self._reader = reader
        self._hold = hold
        #: The text so far of each answer, for `Chunk.partial`.
        self._texts: dict[int, list[str]] = {}
        self._pieces: deque[SentChunk] = deque()
        #: A call whose result nobody has taken: its reader may have been cancelled.
        self._call: asyncio.Task[Any] | None = None
        self._until: float | None = None
        self._begun = self._reading = self._ended = self._stopped = False
        self._error: BaseException | None = None
        #: The whole answer, once it is there.
        self._done: Completion | None = None

    async def __aenter__(self) -> RemoteStream:
        try:
            await self._read(self._start())
        except (asyncio.CancelledError, GeneratorExit):
            # Without `__aexit__`, nobody else aborts the request.
            self._forget()
            raise
        return self

    async def __aexit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if kind is GeneratorExit:
            # The task's coroutine is closed, perhaps by a finalizer: nothing can be awaited.
            self._forget()
        else:
            await self.aclose()

    def __aiter__(self) -> RemoteStream:
        return self

    async def __anext__(self) -> Chunk:
        return await self._read(self._next())

    def __await__(self) -> Generator[Any, Any, Completion]:
        return self._whole().__await__()

    @property
    def ready(self) -> bool:
        """See `Stream.ready`."""
        return bool(self._pieces) or self._ended

    def stop(self) -> None:
        """End the answer politely, from any thread: see `Stream.stop`."""
        self._stopped = True
        if self._route is not None and not self._ended:
            self._dispatcher.post(self._route, "stop", self.request_id)

    async def aclose(self) -> None:
        """Abort, and wait for the replica's confirmation, five seconds at most. A second call does
        nothing."""
        if (task := self._abort()) is not None:
            await asyncio.wait([task], timeout=ACK_TIMEOUT)

    def _abort(self) -> asyncio.Task[None] | None:
        """Have the replica end the request. Returns the call's task; None if no call is needed."""
        if self._ended:
            return None
        self._ended = True
        self._pieces.clear()
        if self._call is not None:
            self._call.cancel()
        if self._route is None:
            return None
        return self._dispatcher.abort(self._route, self.request_id)

    def _forget(self) -> bool:
        """`_abort` without waiting, as a finalizer must, on any thread. Whether there was anything
        to abort."""
        ended, self._ended = self._ended, True
        self._pieces.clear()
        if ended or self._route is None:
            return False
        self._dispatcher.drop(self._route, self.request_id, self._call)
        return True

    async def _whole(self) -> Completion:
        try:
            return await self._read(self._finish())
        except GeneratorExit:
            self._forget()
            raise
        finally:
            if self._route is not None:
                # Cancelled: nobody else holds the awaited stream.
                await self.aclose()

    async def _read(self, work: Coroutine[Any, Any, Result]) -> Result:
        """Run `work` for one task at a time; an error ends the stream."""
        if self._reading:
            work.close()
            raise StreamBusy(f"{self.request_id}: another task is reading this stream")
        self._reading = True
        try:
            return await work
        except (asyncio.CancelledError, GeneratorExit, StopAsyncIteration):
            raise
        except BaseException as error:
            if self._begun:
                self._end(error)
            else:
                self._refused()
            raise
        finally:
            self._reading = False

    async def _start(self) -> Route:
        if self._error is not None:
            raise self._error
        if self._ended:
            raise EngineClosed(f"{self.request_id}: the stream was closed")
        if self._route is None:
            deadline = self._options.get("deadline")
            if deadline is not None and self._until is None:
                self._until = time.monotonic() + deadline + GRACE
            self._route = await self._dispatcher.route(self._prompt, self._options, self._session)
            if self._until is not None:
                self._options["deadline"] = time_left(self._until - GRACE, self.request_id)
        if not self._begun:
            prompt, held = self._prompt, None
            if isinstance(prompt, SpokenMessages):
                prompt = SpokenMessages(prompt, prompt.answered)
            if self._hold is not None and self._call is None:
                held = self._hold.at(self._route)
            told: Begun = await self._ask(self._route, "begin", prompt, self._options, held)
            self.prompt_tokens, self._begun = told.prompt_tokens, True
            if isinstance(self._prompt, SpokenMessages):
                self._prompt.prompt_ids = told.prompt_ids
            if self._stopped:
                self._dispatcher.send(self._route, "stop", self.request_id)
        return self._route

    async def _next(self) -> Chunk:
        if not self._pieces:
            if self._ended and self._begun:
                raise self._error or StopAsyncIteration
            route = await self._start()
            if await self._take(route) is not None:
                raise StopAsyncIteration
        return self._chunk(self._pieces.popleft())

    async def _finish(self) -> Completion:
        if self._done is not None:
            return self._done
        route = await self._start()
        # A `take` whose reader was cancelled. A replica knows no stream whose end it has told.
        if self._call is not None and (told := await self._take(route)) is not None:
            return told
        done: Completion = await self._ask(route, "finish")
        self._dispatcher.router.started(route)
        return self._finished(done)

    async def _take(self, route: Route) -> Completion | None:
        """Take the chunks that are there. Returns the whole answer once there are no more."""
        taken: Taken = await self._ask(route, "take")
        self._dispatcher.router.started(route)
        self._pieces.extend(taken.pieces)
        return None if taken.done is None else self._finished(taken.done)

    def _finished(self, done: Completion) -> Completion:
        self._done, self.usage, self.timings = done, done.usage, done.timings
        self._pieces.clear()
        self._end(None)
        return done

    async def _ask(self, route: Route, method: str, *args: Any) -> Any:
        """The replica's answer to this call, or to the call that is running already."""
        if self._call is None:
            self._call = self._dispatcher.call(route, method, self.request_id, *args)
        left = None if self._until is None else max(0.0, self._until - time.monotonic())
        # A cancellation of this wait leaves the call running.
        await asyncio.wait([self._call], timeout=left)
        call = self._call
        if not call.done():
            self._dispatcher.send(route, "abort", self.request_id)
            raise DeadlineExceeded(f"{self.request_id}: the replica did not end it by its deadline")
        self._call = None
        if call.cancelled():
            if self._ended:
                raise EngineClosed(f"{self.request_id}: the stream was closed while it was read")
            # The replica may come back, still computing the request.
            self._dispatcher.send(route, "abort", self.request_id)
            raise self._dispatcher.gone(route)
        return call.result()

    def _refused(self) -> None:
        """Note that the stream did not begin. None of it was read, so it may be started again, as
        a request of its own: the replica that was asked first may still have this one."""
        if self._route is not None and not self._ended:
            self._dispatcher.end(self._route)
            self._route = None
            if self._call is not None:
                self._call.cancel()
                self._call = None
            self._runs += 1
            self.request_id = f"{self._id}.{self._runs + 1}"

    def _end(self, error: BaseException | None) -> None:
        """Note that the stream has ended at the replica. The first end counts."""
        if not self._ended:
            self._ended, self._error = True, error
            if self._route is not None:
                self._dispatcher.end(self._route)

    def _chunk(self, piece: SentChunk) -> Chunk:
        chunk = piece.chunk
        texts = self._texts.setdefault(chunk.index, [])
        texts.append(chunk.text)
        if self._reader is None and not piece.reasoning and not piece.tool_calls:
            return chunk
        delta = MessageDelta(chunk.text, piece.reasoning, piece.tool_calls)
        return AnswerChunk.of(chunk, texts, self._reader, delta)

    def __del__(self) -> None:
        # A stream whose constructor raised has no route.
        if hasattr(self, "_route") and self._forget():
            warnings.warn(
                f"{self.request_id} was dropped before its end; close it, as `with` does",
                ResourceWarning,
                source=self,
                stacklevel=2,
            )
