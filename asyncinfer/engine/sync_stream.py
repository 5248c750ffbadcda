"""`SyncStream`: a stream for programs without an event loop."""

from __future__ import annotations

from asyncinfer.chunk import Chunk, Completion, Timings, Usage
from asyncinfer.engine.event_loop_thread import EventLoopThread
from asyncinfer.engine.session import SessionStream
from asyncinfer.engine.stream import Stream
from asyncinfer.engine.uncopied import Uncopied
from asyncinfer.errors import EngineClosed, StreamBusy

__all__ = ["SyncStream"]


class SyncStream(Uncopied):
    """An answer as it is generated: an iterator of `Chunk` and a context manager.

    Made by `SyncEngine.stream()`; it costs nothing until it is entered, iterated or completed. One
    thread reads it at a time; any may call `stop` and `close`.
    """

    def __init__(
        self, stream: Stream | SessionStream, loop: EventLoopThread, owner: object = None
    ) -> None:
        """`owner` is kept alive as long as the stream: an engine that is dropped is closed."""
        self._stream = stream
        self._loop = loop
        self._owner = owner
        #: A chunk that was read but not handed to the caller: an interrupt may come between.
        self._read: list[Chunk] = []

    @property
    def request_id(self) -> str:
        """The request's id, as logs and observers have it."""
        return self._stream.request_id

    @property
    def ready(self) -> bool:
        """Whether the next chunk or the end is there already, so that reading does not wait."""
        return self._stream.ready

    def __iter__(self) -> SyncStream:
        return self

    def __next__(self) -> Chunk:
        if not self._loop.run(self._next):
            raise StopIteration
        if not self._read:
            raise StreamBusy(f"{self.request_id}: another thread is reading this stream")
        # In one line: an interrupt comes before it, or finds the chunk given.
        return self._read.pop()

    def __enter__(self) -> SyncStream:
        self._loop.run(self._stream.__aenter__)
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def completion(self) -> Completion:
        """The whole answer, what was read of it included. Interrupted, it aborts the request."""
        return self._loop.run(self._complete)

    @property
    def usage(self) -> Usage | None:
        """Tokens taken, once the stream has ended."""
        return self._stream.usage

    @property
    def timings(self) -> Timings | None:
        """Times taken, once the stream has ended."""
        return self._stream.timings

    def stop(self) -> None:
        """As `Stream.stop`."""
        self._stream.stop()

    def close(self) -> None:
        """Abort: the request's pages are free within a step. A second call does nothing."""
        try:
            self._loop.run(self._stream.aclose)
        except EngineClosed:
            # The engine was closed before, and its streams with it.
            return

    async def _next(self) -> bool:
        """Read a chunk unless there is one that an interrupted thread has left; False at the
        end."""
        if not self._read and (chunk := await anext(self._stream, None)) is not None:
            self._read.append(chunk)
        return bool(self._read)

    async def _complete(self) -> Completion:
        return await self._stream

    def __repr__(self) -> str:
        return f"<asyncinfer.SyncStream of {self._stream!r}>"
