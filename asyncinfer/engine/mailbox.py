"""Where the decode thread leaves a stream's chunks and the consumer takes them."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field

from asyncinfer.chunk import Chunk, Timings, TokenLogprob, Usage
from asyncinfer.engine.ports import Cell, Port

__all__ = ["Content", "Mailbox", "Outcome"]

#: The fields of a `Chunk`.
Content = tuple[str, tuple[int, ...], tuple[TokenLogprob, ...], int, str | None]

_new = tuple.__new__


@dataclass(frozen=True, slots=True)
class Outcome:
    """How a stream ended: `error` is None for a regular end."""

    error: BaseException | None
    usage: Usage = field(default_factory=Usage)
    timings: Timings = field(default_factory=Timings)
    prompt_logprobs: tuple[TokenLogprob | None, ...] | None = None


class Mailbox(Cell):
    """One stream's chunks. The decode thread posts them, and everything else happens on the event
    loop of the stream.

    The stream owns the mailbox and the engine's job refers to it, never to the stream: so a
    forgotten stream can be collected.
    """

    __slots__ = ("chunks", "outcome", "parked", "quiet", "taken")

    def __init__(self, port: Port) -> None:
        super().__init__(port)
        #: Plain tuples, which become chunks when they are taken: Python keeps used tuples for
        #: reuse, so that a step of many streams does not set the garbage collector off.
        self.chunks: deque[Content] = deque()
        #: Tokens taken out.
        self.taken = 0
        #: The engine waits for the consumer: below half full, it must be told.
        self.parked = False
        #: The consumer wants everything at the end: no wake-ups, no bound but `max_tokens`.
        self.quiet = False
        #: Set once, after the last chunk.
        self.outcome: Outcome | None = None

    def put(self, content: Content) -> None:
        """Have a chunk delivered with the next flush (decode thread)."""
        batch = self.port.batch
        batch.mailboxes.append(self)
        batch.contents.append(content)
        if not self.quiet:
            batch.urgent = True

    def close(self, outcome: Outcome) -> None:
        """Have the end delivered with the next flush, after all that was put (decode thread)."""
        batch = self.port.batch
        batch.news.append((self, outcome))
        batch.urgent = True

    def tell(self, news: Outcome) -> None:
        """The end: nothing comes after it, and a second one is ignored."""
        if self.outcome is None:
            self.outcome = news
            super().tell(news)

    def take(self) -> Chunk:
        """The next chunk (there must be one)."""
        # `Chunk._make` without its check of the length, which costs as much as the rest.
        chunk = _new(Chunk, self.chunks.popleft())
        self.taken += len(chunk[1])
        return chunk
