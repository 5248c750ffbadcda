"""Where the decode thread leaves a stream's chunks and the consumer takes them."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from typing import TypeAlias

from asyncinfer.chunk import Chunk, Timings, Usage
from asyncinfer.engine.coalescing import Coalescing
from asyncinfer.engine.loop_bridge import LoopBridge, Waiter
from asyncinfer.scheduler import RowLogprobs

__all__ = ["Content", "Outcome", "Packed", "ScoredBuffer", "StreamBuffer"]

#: The fields of a `Chunk`.
Content = tuple[str, tuple[int, ...], "Packed", int, str | None]
#: Logprobs on their way; the empty tuple for none.
Packed: TypeAlias = "RowLogprobs | tuple[()]"

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
    #: Of the prompt's tokens from the second one on, in parts; None if not asked for.
    prompt_logprobs: tuple[RowLogprobs, ...] | None = None

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


class StreamBuffer(Waiter):
    """One stream's chunks. The decode thread posts them; the stream's event loop does the rest.

    The engine's job refers to the buffer and never to the stream, so that a forgotten stream can be
    collected.
    """

    __slots__ = ("chunks", "outcome", "paused", "quiet", "taken")

    def __init__(self, bridge: LoopBridge, coalesce: int | None = None) -> None:
        """`coalesce`: chunks beyond so many are merged; None keeps each."""
        super().__init__(bridge)
        #: Plain tuples, which become chunks when they are taken: Python reuses freed tuples, so a
        #: step of many streams does not set off the garbage collector.
        self.chunks: deque[Content] | Coalescing = (
            deque() if coalesce is None else Coalescing(coalesce)
        )
        #: Tokens taken out.
        self.taken = 0
        #: The engine waits for the consumer: below half full, it must be told.
        self.paused = False
        #: The consumer wants everything at the end: no wake-ups, no bound but `max_tokens`.
        self.quiet = False
        #: Set once, after the last chunk.
        self.outcome: Outcome | None = None

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
        """The end: nothing comes after it, and a second one is ignored."""
        if self.outcome is None:
            if news.error is not None:
                sealed = _Sealed()
                while self.chunks:
                    deque.append(sealed, self.chunks.popleft())
                self.chunks = sealed
            self.outcome = news
            super().tell(news)

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
        text, token_ids, packed, index, reason = self.take_packed()
        return Chunk(text, token_ids, tuple(packed), index, reason)

    def take_packed(self) -> Content:
        content = super().take_packed()
        packed = content[2]
        if isinstance(packed, RowLogprobs):
            self._kept[content[3]].append(packed)
        return content

    def kept(self, index: int) -> list[RowLogprobs]:
        return self._kept[index]
