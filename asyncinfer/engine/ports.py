"""How the decode thread reaches event loops: a `Port` per loop, a `Cell` per waiter.

A cell is waited on by at most one task, on its own loop, and looked at by nobody elsewhere: what
other threads have for it is posted to the loop. A task looks for news and begins to wait without a
pause in between, so no wake-up is lost.
"""

from __future__ import annotations

import asyncio
import sys
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Awaitable, Callable
from contextlib import suppress
from itertools import islice
from operator import length_hint
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from asyncinfer.engine.mailbox import Content, Mailbox

__all__ = ["Batch", "Cell", "Latch", "Port", "current_port"]

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

    __slots__ = ("_arrived", "batch", "closed")

    def __init__(self) -> None:
        #: The loop is gone: nothing can be woken there any more.
        self.closed = False
        #: What the next `flush` takes along (decode thread only).
        self.batch = Batch()
        self._arrived: deque[Batch] = deque()

    def flush(self) -> None:
        """At most one thread-safe call into the loop, however many mailboxes have news."""
        if self.batch.urgent:
            batch, self.batch = self.batch, Batch()
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
        for cell in tuple(self._cells):
            cell.port.send(Batch((cell, None)))

    async def wait(self, port: Port) -> None:
        cell = Cell(port)
        self._cells.append(cell)
        try:
            await cell.wait_for(lambda: self.is_set)
        finally:
            self._cells.remove(cell)


class AsyncioPort(Port):
    """asyncio and everything that keeps to its interface, such as uvloop."""

    __slots__ = ("_loop",)

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        super().__init__()
        self._loop = loop

    def post(self, function: Callable[..., object], *args: Any) -> None:
        try:
            self._loop.call_soon_threadsafe(function, *args)
        except RuntimeError:
            # Raised for a closed loop only; it may close between any check and this call.
            self.closed = True

    def soon(self, function: Callable[..., object], *args: Any) -> None:
        self._loop.call_soon(function, *args)

    def probe(self) -> bool:
        self.closed = self.closed or self._loop.is_closed()
        return not self.closed

    def here(self) -> bool:
        return asyncio._get_running_loop() is self._loop

    def announce(self, cell: Cell) -> bool:
        if asyncio._get_running_loop() is not self._loop:
            return False
        cell.waiter = self._loop.create_future()
        return True

    def park(self, cell: Cell) -> Awaitable[object]:
        waiter: asyncio.Future[None] = cell.waiter
        return waiter

    def wake(self, cell: Cell) -> None:
        waiter = cell.waiter
        if waiter is not None and not waiter.done():
            waiter.set_result(None)

    async def checkpoint(self) -> None:
        await asyncio.sleep(0)


class _News:
    """Handed to a task that trio wakes. An `outcome.Value`, of which trio would make one per
    wake-up, is for one use only; this one is not."""

    def unwrap(self) -> None: ...


_NEWS = _News()


class TrioPort(Port):
    """A trio run."""

    __slots__ = (
        "_current_task",
        "_current_token",
        "_gave_up",
        "_lowlevel",
        "_reschedule",
        "_run_finished",
        "_sleep",
        "_token",
    )

    def __init__(self, trio: Any, token: Any) -> None:
        super().__init__()
        self._token = token
        self._lowlevel = trio.lowlevel
        self._current_task = trio.lowlevel.current_task
        self._current_token = trio.lowlevel.current_trio_token
        self._reschedule = trio.lowlevel.reschedule
        self._sleep = trio.lowlevel.wait_task_rescheduled
        self._run_finished = trio.RunFinishedError
        succeeded = trio.lowlevel.Abort.SUCCEEDED
        #: Made once: whatever is made per wait is one more object for the garbage collector.
        self._gave_up = lambda _: succeeded

    def post(self, function: Callable[..., object], *args: Any) -> None:
        try:
            self._token.run_sync_soon(function, *args)
        except self._run_finished:
            self.closed = True

    def soon(self, function: Callable[..., object], *args: Any) -> None:
        self.post(function, *args)

    def probe(self) -> bool:
        self.post(_nothing)
        return not self.closed

    def here(self) -> bool:
        try:
            return self._current_token() is self._token
        except RuntimeError:
            return False

    def announce(self, cell: Cell) -> bool:
        try:
            task = self._current_task()
        except RuntimeError:
            return False
        if task is not cell.reader:
            if self._current_token() is not self._token:
                return False
            cell.reader = task
        cell.waiter = task
        return True

    def park(self, cell: Cell) -> Awaitable[object]:
        # trio clears this when it reschedules the task, whether we or a cancellation wake it.
        cell.waiter.custom_sleep_data = cell
        waiting: Awaitable[object] = self._sleep(self._gave_up)
        return waiting

    def wake(self, cell: Cell) -> None:
        task = cell.waiter
        if task is not None and task.custom_sleep_data is cell:
            self._reschedule(task, _NEWS)

    async def checkpoint(self) -> None:
        await self._lowlevel.checkpoint()


def current_port(known: dict[object, Port]) -> Port:
    """The port of the running event loop, from `known` or new in it. Raises `RuntimeError` outside
    an event loop."""
    trio = sys.modules.get("trio")
    # Without it, another thread is in the middle of importing trio.
    lowlevel = getattr(trio, "lowlevel", None)
    if lowlevel is not None and lowlevel.in_trio_task():
        key: object = lowlevel.current_trio_token()
    else:
        key = asyncio.get_running_loop()
    port = known.get(key)
    if port is None:
        fresh = AsyncioPort(key) if isinstance(key, asyncio.AbstractEventLoop) else None
        port = known.setdefault(key, fresh or TrioPort(trio, key))
    return port


def _nothing() -> None: ...
