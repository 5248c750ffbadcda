"""How the decode thread reaches event loops: a `Port` per loop, a `Cell` per waiter.

A cell is waited on by at most one task, on its own loop, and looked at by nobody elsewhere: what
other threads have for it is posted to the loop. A task looks for news and begins to wait without a
pause in between, so no wake-up is lost.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Awaitable, Callable
from contextlib import suppress
from itertools import islice
from operator import length_hint
from threading import Lock
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from asyncinfer.engine.mailbox import Content, Mailbox

__all__ = ["BURST", "Batch", "Cell", "Latch", "Port"]

#: Chunks handed out in one go: with thousands, the loop would be busy for tens of milliseconds, and
#: what is alive between a wake-up and its task would set the garbage collector off at every step.
BURST = 128


class Batch:
    """What goes to one event loop in one call: chunks, and after them other news."""

    __slots__ = ("contents", "items", "mailboxes", "news", "pending", "urgent")

    def __init__(self, *news: tuple[Cell, Any]) -> None:
        #: `contents[i]` is for `mailboxes[i]`.
        self.mailboxes: list[Mailbox] = []
        self.contents: list[Content] = []
        #: What cells are to be told.
        self.news = list(news)
        #: There is something that somebody may wait for.
        self.urgent = False
        #: What is still to be handed out. An interrupt in the middle, such as Ctrl-C raises, loses
        #: no place.
        self.pending = iter(self.mailboxes)
        self.items = zip(self.pending, self.contents, strict=True)


class Port(ABC):
    """One event loop as an engine's threads see it.

    Each object that two threads write to costs a transfer between their cores' caches, counting
    references included. So the decode thread only adds a token to a list; the rest is the loop's.
    """

    __slots__ = ("_arrived", "_lock", "batch", "closed")

    def __init__(self) -> None:
        #: The loop is gone: nothing can be woken there any more.
        self.closed = False
        #: What the next `flush` takes along (decode thread only).
        self.batch = Batch()
        self._arrived: deque[Batch] = deque()
        #: Held by whoever takes the batch.
        self._lock = Lock()

    def flush(self) -> None:
        """At most one thread-safe call into the loop, however many mailboxes have news."""
        if self.batch.urgent:
            with self._lock:
                batch, self.batch = self.batch, Batch()
                self.send(batch)

    def rescue(self) -> None:
        """Send what the decode thread has put and will not flush, since it hangs. What it puts
        from now on is lost: whoever calls this ends every stream of the loop next. Any thread."""
        with self._lock:
            stuck, self.batch = self.batch, Batch()
            # It may be in the middle of putting a chunk.
            whole = len(stuck.contents)
            batch = Batch(*stuck.news)
            batch.mailboxes += stuck.mailboxes[:whole]
            batch.contents += stuck.contents[:whole]
            self.send(batch)

    def send(self, batch: Batch) -> None:
        """Hand a batch out on the loop, after all that were sent before. Any thread."""
        self._arrived.append(batch)
        self.post(self._hand_out)
        if self.closed:
            # Nobody waits there any more, but how a stream ended can be asked from anywhere.
            with suppress(IndexError):
                while True:
                    for cell, news in self._arrived.popleft().news:
                        cell.waiter = None
                        cell.tell(news)

    def _hand_out(self) -> None:
        """The next `BURST` chunks; everybody else has a turn before what is left."""
        if not self._arrived:
            return
        batch = self._arrived[0]
        wake = self.wake
        for mailbox, content in islice(batch.items, BURST):
            mailbox.chunks.append(content)
            if mailbox.waiter is not None and not mailbox.quiet:
                wake(mailbox)
        if not length_hint(batch.pending):
            for cell, news in batch.news:
                cell.tell(news)
            self._arrived.popleft()
        if self._arrived:
            self.soon(self._hand_out)

    @abstractmethod
    def post(self, function: Callable[..., object], *args: Any) -> None:
        """Run `function` on the loop, from any thread. A loop that is gone sets `closed`."""

    @abstractmethod
    def soon(self, function: Callable[..., object], *args: Any) -> None:
        """Run `function` on the loop, after what is due there already; from the loop itself."""

    @abstractmethod
    def probe(self) -> bool:
        """Whether the loop still exists; sets `closed` if not."""

    @abstractmethod
    def here(self) -> bool:
        """Whether the caller runs on this loop."""

    def cancelled(self) -> bool:
        """Whether the current task is being cancelled otherwise than by a scope around it."""
        return False

    @abstractmethod
    def announce(self, cell: Cell) -> bool:
        """Make the current task the cell's waiter; it parks next.
        False, and nothing is done, where the caller does not run on this loop."""

    @abstractmethod
    def park(self, cell: Cell) -> Awaitable[object]:
        """Wait until the announced `cell` is woken; returns for no reason too. Cancellable."""

    @abstractmethod
    def wake(self, cell: Cell) -> None:
        """Wake the cell's waiter, if any. Runs on the loop."""

    @abstractmethod
    async def checkpoint(self) -> None:
        """Let other tasks run, and be cancelled here if a cancellation is due."""


class Cell:
    """A place where one task waits for news from other threads."""

    __slots__ = ("port", "reader", "waiter")

    def __init__(self, port: Port) -> None:
        self.port = port
        self.waiter: Any = None
        #: The task that waited last, if its loop has tasks of its own: a task never moves.
        self.reader: object = None

    def tell(self, news: Any) -> None:
        """Take what was sent for this cell, and wake its waiter. Runs on the loop."""
        if self.waiter is not None:
            self.port.wake(self)

    async def wait_for(self, ready: Callable[[], object]) -> None:
        """Wait until `ready()` is true. Whoever makes it true has this cell woken after it."""
        while not ready():
            announced = self.port.announce(self)
            assert announced, "waited for on another event loop"
            try:
                await self.port.park(self)
            finally:
                self.waiter = None


class Latch:
    """A one-way flag that tasks on any loop can await and any thread can set."""

    __slots__ = ("_cells", "is_set")

    def __init__(self) -> None:
        self.is_set = False
        self._cells: list[Cell] = []

    def set(self) -> None:
        self.is_set = True
        for cell in self._cells.copy():
            cell.port.send(Batch((cell, None)))

    async def wait(self, port: Port) -> None:
        cell = Cell(port)
        self._cells.append(cell)
        try:
            await cell.wait_for(lambda: self.is_set)
        finally:
            self._cells.remove(cell)
