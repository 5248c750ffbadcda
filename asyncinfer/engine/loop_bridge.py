"""How an engine's threads reach event loops: one `LoopBridge` per loop, one `Waiter` per wait.

At most one task waits on a waiter, on the waiter's own loop. Other threads never look at a waiter:
they post what they have for it to its loop. A task looks for news and begins to wait without a
pause in between, so no wake-up is lost.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Awaitable, Callable, Iterable
from contextlib import suppress
from itertools import islice
from operator import length_hint
from threading import Lock
from time import perf_counter
from typing import Any, Protocol, TypeAlias

from asyncinfer.scheduler import RowLogprobs

__all__ = [
    "BURST",
    "END_COST",
    "Batch",
    "ChunkWaiter",
    "Content",
    "Latch",
    "LoopBridge",
    "Packed",
    "Waiter",
    "send_news",
]

#: The most chunks and ends delivered in one turn of a loop. Thousands would keep it busy for tens
#: of milliseconds, and so many live objects would set off the garbage collector.
BURST = 128
#: The fewest chunks of a turn, and how long tasks may take for them before the next turn has fewer:
#: a web server takes 60 microseconds for a chunk, a consumer in the program itself two.
LEAST_BURST, TURN_SECONDS = 8, 0.002
#: Chunks that an end counts for: its task leaves a loop and an `async with`, and often ends itself.
END_COST = 4

#: Logprobs on their way; the empty tuple for none.
Packed: TypeAlias = RowLogprobs | tuple[()]
#: The fields of a `Chunk`.
Content: TypeAlias = tuple[str, tuple[int, ...], Packed, int, str | None, str | int | None]


class Batch:
    """What one flush delivers to one event loop: chunks, then news such as ends."""

    __slots__ = ("buffers", "contents", "items", "news", "pending", "urgent")

    def __init__(self, *news: tuple[Waiter, Any]) -> None:
        #: `contents[i]` is for `buffers[i]`.
        self.buffers: list[ChunkWaiter] = []
        self.contents: list[Content] = []
        #: Arguments of `Waiter.tell`.
        self.news = deque(news)
        #: Whether a task may wait for something in the batch.
        self.urgent = False
        #: Iterators keep the place of a delivery that an interrupt such as Ctrl-C breaks off.
        self.pending = iter(self.buffers)
        self.items = zip(self.pending, self.contents, strict=True)


class LoopBridge(ABC):
    """One event loop as an engine's threads see it.

    Each object that two threads write to costs a transfer between their cores' caches, and a
    reference counts as a write. So the decode thread only appends a token to a list; the loop does
    the rest.
    """

    __slots__ = ("_arrived", "_burst", "_delivering", "_lock", "_paused", "batch", "closed")

    def __init__(self) -> None:
        #: Whether the loop is gone, so that nothing can be woken there any more.
        self.closed = False
        #: The next `flush` sends this. Only the decode thread adds to it.
        self.batch = Batch()
        self._arrived: deque[Batch] = deque()
        #: Whether a call of `deliver` is due on the loop.
        self._delivering = False
        #: Held while `batch` is replaced.
        self._lock = Lock()
        #: How many chunks the next turn delivers at most, and when the last turn left chunks to it.
        self._burst = BURST
        self._paused: float | None = None

    def flush(self) -> None:
        """At most one thread-safe call into the loop, however many buffers have news."""
        if self.batch.urgent:
            with self._lock:
                batch, self.batch = self.batch, Batch()
                self._arrived.append(batch)
            self._announce()

    def rescue(self) -> None:
        """Send what a hanging decode thread has put and will not flush. Any thread.

        What the thread puts from now on is lost, so the caller ends every stream of the loop next.
        """
        with self._lock:
            stuck, self.batch = self.batch, Batch()
            # The thread may hang between its two appends.
            whole = len(stuck.contents)
            batch = Batch(*stuck.news)
            batch.buffers += stuck.buffers[:whole]
            batch.contents += stuck.contents[:whole]
            self._arrived.append(batch)
        self._announce()

    def send(self, batch: Batch) -> None:
        """Have a batch delivered on the loop, after all that were sent before. Any thread."""
        self._arrived.append(batch)
        self._announce()

    def _announce(self) -> None:
        """Call into the loop, which may be a host's own and hang: no lock is held here."""
        if self._delivering:
            # The call that is due delivers the last batch too, unless its loop is gone.
            self.probe()
        else:
            self._delivering = True
            self.post(self.deliver)
        if self.closed:
            self._tell_ends()

    def redeliver(self) -> None:
        """Go on where an interrupt such as Ctrl-C broke a delivery off. Any thread."""
        if self._arrived:
            self.post(self.deliver)
            if self.closed:
                self._tell_ends()

    def _tell_ends(self) -> None:
        """Set the outcomes that cannot be delivered to a loop that is gone: streams may be asked
        how they ended."""
        with suppress(IndexError):
            while True:
                for waiter, news in self._arrived.popleft().news:
                    waiter.waiting = None
                    waiter.tell(news)

    def deliver(self) -> None:
        """Deliver up to `BURST` chunks and ends; other callbacks get a turn before the rest."""
        left = self._burst = self._fitting()
        try:
            while left > 0 and self._arrived:
                left = self._deliver_some(self._arrived[0], left)
        finally:
            # In this order: a thread that sends meanwhile finds the flag down, or is found here.
            self._delivering = False
            if self._arrived:
                self._delivering = True
                self._paused = perf_counter()
                self.soon(self.deliver)

    def _fitting(self) -> int:
        """How many chunks one turn should deliver, by how long tasks took for the last turn's."""
        paused, self._paused = self._paused, None
        if paused is None:
            return self._burst
        if (took := perf_counter() - paused) > TURN_SECONDS:
            return max(LEAST_BURST, self._burst // 2)
        return min(BURST, 2 * self._burst) if took < TURN_SECONDS / 4 else self._burst

    def _deliver_some(self, batch: Batch, most: int) -> int:
        """Deliver about `most` of the oldest batch. Returns how many more this turn may deliver."""
        before = length_hint(batch.pending)
        wake = self.wake
        for buffer, content in islice(batch.items, most):
            buffer.chunks.append(content)
            if buffer.waiting is not None and not buffer.quiet:
                wake(buffer)
        waiting = length_hint(batch.pending)
        most -= before - waiting
        if not waiting:
            while batch.news and most > 0:
                waiter, news = batch.news[0]
                waiter.tell(news)
                batch.news.popleft()
                most -= END_COST
            if not batch.news:
                self._arrived.popleft()
        return most

    @abstractmethod
    def post(self, function: Callable[..., object], *args: Any) -> None:
        """Run `function` on the loop, from any thread. A loop that is gone sets `closed`."""

    @abstractmethod
    def soon(self, function: Callable[..., object], *args: Any) -> None:
        """Run `function` on the loop in its next turn. Called on the loop."""

    @abstractmethod
    def probe(self) -> bool:
        """Whether the loop still exists; sets `closed` if not. Any thread."""

    @abstractmethod
    def here(self) -> bool:
        """Whether the caller runs on this loop."""

    def cancelled(self) -> bool:
        """Whether the current task is being cancelled otherwise than by a scope around it."""
        return False

    @abstractmethod
    def begin_wait(self, waiter: Waiter) -> Awaitable[object] | None:
        """Make the current task the one that waits on `waiter`. It then awaits the result, which
        ends when `waiter` is woken, perhaps spuriously, and can be cancelled. None, and nothing is
        done, where the caller does not run on this loop."""

    @abstractmethod
    def wake(self, waiter: Waiter) -> None:
        """Wake the task that waits on `waiter`, if any. Runs on the loop."""

    @abstractmethod
    async def checkpoint(self) -> None:
        """Let other tasks run, and be cancelled here if a cancellation is due."""


def send_news(news: Iterable[tuple[Waiter, Any]]) -> None:
    """Have waiters told, with one batch for each event loop. Any thread."""
    batches: dict[LoopBridge, Batch] = {}
    for waiter, what in news:
        batches.setdefault(waiter.bridge, Batch()).news.append((waiter, what))
    for bridge, batch in batches.items():
        bridge.send(batch)


class Waiter:
    """Where one task waits for news from other threads."""

    __slots__ = ("bridge", "last_task", "waiting")

    def __init__(self, bridge: LoopBridge) -> None:
        self.bridge = bridge
        #: The future or task that waits now; None while none does.
        self.waiting: Any = None
        #: The trio task that waited last: a task never moves to another loop.
        self.last_task: object = None

    def tell(self, news: Any) -> None:
        """Take the news that were sent to this waiter, and wake its task. Runs on the loop."""
        if self.waiting is not None:
            self.bridge.wake(self)

    async def wait_for(self, condition: Callable[[], object]) -> None:
        """Wait until `condition()` is true. Whoever makes it true has the waiter woken after."""
        while not condition():
            news = self.bridge.begin_wait(self)
            assert news is not None, "waited for on another event loop"
            try:
                await news
            finally:
                # A cancellation's traceback refers to this frame, which keeps no future alive.
                self.waiting = news = None


class Chunks(Protocol):
    """What chunks are delivered into."""

    def append(self, content: Content, /) -> None: ...


class ChunkWaiter(Waiter):
    """A waiter to which chunks are delivered before its news."""

    __slots__ = ("chunks", "quiet")

    def __init__(self, bridge: LoopBridge, chunks: Chunks) -> None:
        super().__init__(bridge)
        self.chunks = chunks
        #: Whether the consumer wants everything at the end: no wake-ups, no bound but `max_tokens`.
        self.quiet = False


class Latch:
    """A one-way flag that tasks on any loop can await and any thread can set."""

    __slots__ = ("_waiters", "is_set")

    def __init__(self) -> None:
        self.is_set = False
        self._waiters: list[Waiter] = []

    def set(self) -> None:
        self.is_set = True
        send_news((waiter, None) for waiter in self._waiters.copy())

    async def wait(self, bridge: LoopBridge) -> None:
        waiter = Waiter(bridge)
        self._waiters.append(waiter)
        try:
            await waiter.wait_for(lambda: self.is_set)
        finally:
            self._waiters.remove(waiter)
