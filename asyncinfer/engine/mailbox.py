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
    """One stream's chunks. The decode thread appends, the consumer takes; neither locks:
    each counter has one writer, and `deque` operations are atomic.

    The stream owns the mailbox and the engine's job refers to it, never to the stream: so a
    forgotten stream can be collected.
    """

    __slots__ = ("capacity", "chunks", "delivered", "outcome", "parked", "quiet", "taken")

    def __init__(self, port: Port, capacity: int) -> None:
        super().__init__(port)
        #: Plain tuples, which become chunks when they are taken: Python keeps used tuples for
        #: reuse, so that a step of many streams does not set the garbage collector off.
        self.chunks: deque[Content] = deque()
        #: Tokens the stream holds unread before `on_full` applies.
        self.capacity = capacity
        #: Tokens put in (decode thread) and taken out (consumer).
        self.delivered = 0
        self.taken = 0
        #: The engine waits for the consumer: below half full, it must be told.
        self.parked = False
        #: The consumer wants everything at the end: no wake-ups, no bound but `max_tokens`.
        self.quiet = False
        #: Set once, after the last chunk.
        self.outcome: Outcome | None = None

    @property
    def full(self) -> bool:
        return self.delivered - self.taken >= self.capacity and not self.quiet

    @property
    def drained(self) -> bool:
        """Low enough for a parked stream to go on."""
        return (self.delivered - self.taken) * 2 <= self.capacity or self.quiet

    def put(self, content: Content) -> None:
        self.chunks.append(content)
        self.delivered += len(content[1])
        if self.waiter is not None and not self.quiet:
            self.port.notify(self)

    def end(self, outcome: Outcome) -> None:
        """Nothing comes after this; a second end is ignored."""
        if self.outcome is None:
            self.outcome = outcome
            if self.waiter is not None:
                self.port.notify(self)

    def take(self) -> Chunk:
        """The next chunk (there must be one)."""
        # `Chunk._make` without its check of the length, which costs as much as the rest.
        chunk = _new(Chunk, self.chunks.popleft())
        self.taken += len(chunk[1])
        return chunk

    def has_news(self) -> bool:
        return bool(self.chunks) or self.outcome is not None
