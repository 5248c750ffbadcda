"""Where the decode thread leaves a stream's chunks and the consumer takes them."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field, replace
from io import StringIO
from typing import TYPE_CHECKING

import anyio

from asyncinfer.chunk import Chunk, Timings, Usage
from asyncinfer.engine.loop_bridge import ChunkWaiter, Content, LoopBridge
from asyncinfer.scheduler import RowLogprobs

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt

__all__ = ["Coalescing", "Outcome", "ScoredBuffer", "StreamBuffer"]

#: How long a leaving task waits for the engine to confirm; the pages are released either way.
#: `LAST_MOMENT` is for a task that is cancelled, or whose time has run out.
ACK_TIMEOUT = 5.0
LAST_MOMENT = 0.02

_new = tuple.__new__


class _Sealed(deque[Content]):
    """What is left to read of a stream that has ended. It drops what a step still delivers after
    the end, such as one that hung, so that no token has to be checked."""

    __slots__ = ()

    def append(self, content: Content, /) -> None:
        pass


@dataclass(frozen=True, slots=True)
class Outcome:
    """How a stream ended: `error` is None for a regular end."""

    error: BaseException | None
    usage: Usage = field(default_factory=Usage)
    timings: Timings = field(default_factory=Timings)
    #: Logprobs of the prompt's tokens from the second one on, in parts; None if not asked for.
    prompt_logprobs: tuple[RowLogprobs, ...] | None = None
    #: Scores of a beam search's answers, the best first; None for any other request.
    scores: tuple[float, ...] | None = None
    #: float32 `[hidden]` of a prompt that is embedded; None for any other.
    embedding: npt.NDArray[np.float32] | None = None

    def raised(self) -> BaseException:
        """The error, which there must be, for one reader to raise: a copy that nothing refers to.

        Its traceback will refer to the reader's frames, and these to the stream. The stream refers
        to this outcome, and would otherwise stay until the garbage collector finds the circle. For
        the same reason the reader keeps the copy in no variable.
        """
        error = self.error
        assert error is not None
        copy = type(error).__new__(type(error), *error.args)
        copy.__dict__.update(error.__dict__)
        copy.__cause__ = error.__cause__
        return copy


class Coalescing:
    """A queue that holds at most `most` chunks one by one, and merges the others into one chunk
    for each answer. Adding a chunk costs the same however many tokens wait.

    The reader has the queue, so no token is lost whichever thread ends the stream.
    """

    __slots__ = ("_late", "_most", "_single")

    def __init__(self, most: int) -> None:
        self._most = most
        self._single: deque[Content] = deque()
        #: By answer, the chunk that those after the single ones are merged into.
        self._late: dict[int, _Late] = {}

    def __len__(self) -> int:
        return len(self._single) + len(self._late)

    def append(self, content: Content) -> None:
        if not self._late and len(self._single) < self._most:
            self._single.append(content)
        else:
            index = content[3]
            late = self._late.get(index)
            if late is None:
                late = self._late[index] = _Late(index)
            late.add(content)

    def popleft(self) -> Content:
        """The next chunk; `IndexError` if there is none."""
        if self._single or not self._late:
            return self._single.popleft()
        return self._late.pop(next(iter(self._late))).content()


class _Late:
    """A chunk that later chunks are merged into."""

    __slots__ = ("_index", "_logprobs", "_reason", "_stop", "_text", "_tokens")

    def __init__(self, index: int) -> None:
        self._index = index
        self._text = StringIO(newline="")
        self._tokens: list[int] = []
        self._logprobs: list[RowLogprobs] = []
        self._reason: str | None = None
        self._stop: str | int | None = None

    def add(self, content: Content) -> None:
        text, tokens, logprobs, _, self._reason, self._stop = content
        self._text.write(text)
        self._tokens += tokens
        if logprobs:
            self._logprobs.append(logprobs)

    def content(self) -> Content:
        logprobs = RowLogprobs.join(self._logprobs) if self._logprobs else ()
        text, tokens = self._text.getvalue(), tuple(self._tokens)
        return text, tokens, logprobs, self._index, self._reason, self._stop


class StreamBuffer(ChunkWaiter):
    """One stream's chunks. The decode thread posts them; the stream's event loop does the rest.

    The engine's request refers to the buffer and never to the stream, so that a forgotten stream
    can be collected.
    """

    __slots__ = ("_waited", "outcome", "paused", "taken")

    #: Plain tuples, which become chunks when they are taken: Python reuses freed tuples, so a step
    #: of many streams does not set off the garbage collector.
    chunks: deque[Content] | Coalescing

    def __init__(self, bridge: LoopBridge, coalesce: int | None = None) -> None:
        """`coalesce`: chunks beyond so many are merged; None keeps each."""
        super().__init__(bridge, deque() if coalesce is None else Coalescing(coalesce))
        #: Tokens taken out.
        self.taken = 0
        #: Whether the engine has paused the request until it is told that the buffer is half empty.
        self.paused = False
        #: Set once, after the last chunk.
        self.outcome: Outcome | None = None
        #: Set when the task that waits for the end stops waiting; None if none does.
        self._waited: anyio.Event | None = None

    @property
    def failed(self) -> bool:
        """Whether the stream has ended with an error."""
        return self.outcome is not None and self.outcome.error is not None

    def put(self, content: Content) -> None:
        """Have a chunk delivered with the next flush (decode thread)."""
        batch = self.bridge.batch
        batch.buffers.append(self)
        batch.contents.append(content)
        if not self.quiet:
            batch.urgent = True

    def close(self, outcome: Outcome) -> None:
        """Have the end delivered with the next flush, after all that was put (decode thread)."""
        batch = self.bridge.batch
        batch.news.append((self, outcome))
        batch.urgent = True

    def tell(self, news: Outcome) -> None:
        """Take the end of the stream. Nothing is delivered after it, and a second one is
        ignored."""
        if self.outcome is None:
            if news.error is not None:
                sealed, count = _Sealed(), self.taken
                while self.chunks:
                    content = self.chunks.popleft()
                    count += len(content[1])
                    deque.append(sealed, content)
                self.chunks = sealed
                if news.usage.completion_tokens != count:
                    # Another thread sent the end, before what the decode thread had drawn.
                    news = replace(news, usage=replace(news.usage, completion_tokens=count))
            self.outcome = news
            super().tell(news)

    async def wait_for_end(self) -> None:
        """Wait for the end. Several tasks may: one waits here, the others wait for that one."""
        while self.outcome is None:
            if self._waited is not None:
                await self._waited.wait()
                continue
            waited = self._waited = anyio.Event()
            try:
                await self.wait_for(lambda: self.outcome is not None)
            finally:
                self._waited = None
                waited.set()

    async def wait_a_moment(self) -> None:
        """`wait_for_end`, for as long as a leaving task may be kept."""
        patience = LAST_MOMENT
        if not self.bridge.cancelled():
            left = anyio.current_effective_deadline() - anyio.current_time()
            patience = max(LAST_MOMENT, min(ACK_TIMEOUT, left))
        with anyio.move_on_after(patience, shield=True):
            await self.wait_for_end()

    @property
    def ready(self) -> bool:
        """Whether a chunk or the end is there."""
        return bool(self.chunks) or self.outcome is not None

    def take_packed(self) -> Content:
        """The next chunk as a plain tuple (there must be one)."""
        content = self.chunks.popleft()
        self.taken += len(content[1])
        return content

    def kept(self, index: int) -> list[RowLogprobs]:
        """Logprobs of all that was taken of an answer, in parts."""
        return []

    def take(self) -> Chunk:
        """The next chunk (there must be one)."""
        # `Chunk._make` without its check of the length, which costs as much as the rest.
        chunk: Chunk = _new(Chunk, self.chunks.popleft())
        self.taken += len(chunk[1])
        return chunk


class ScoredBuffer(StreamBuffer):
    """The buffer of a stream that asked for logprobs.

    Logprobs stay packed until a chunk is taken. The buffer keeps those of taken chunks packed, for
    a consumer that awaits the whole answer.
    """

    __slots__ = ("_kept",)

    def __init__(self, bridge: LoopBridge, answers: int, coalesce: int | None = None) -> None:
        super().__init__(bridge, coalesce)
        self._kept: list[list[RowLogprobs]] = [[] for _ in range(answers)]

    def take(self) -> Chunk:
        text, token_ids, packed, index, reason, stop = self.take_packed()
        return Chunk(text, token_ids, tuple(packed), index, reason, stop)

    def take_packed(self) -> Content:
        content = super().take_packed()
        packed = content[2]
        if isinstance(packed, RowLogprobs):
            self._kept[content[3]].append(packed)
        return content

    def kept(self, index: int) -> list[RowLogprobs]:
        return self._kept[index]
