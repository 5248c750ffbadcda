"""Streams and events of a device that is not there, with the order a real one gives and no more.

Work is done as it is handed over, so nothing can come out wrong by itself. Instead every stream
knows, as a vector clock (Mattern, 1989), which work of the others it has waited for, and whoever
touches memory without having waited for the last one that did is told so.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

import torch
from fakes.weak_storage import WeakStorage

__all__ = ["FakeEvent", "FakeStream", "Memories", "StreamOrderError"]


class StreamOrderError(AssertionError):
    """Something relied on an order of work that nobody had asked for."""


@dataclass(eq=False, slots=True)
class FakeStream:
    """A stream, or the host."""

    name: str
    #: Work handed over so far, and how much of each other stream's is done before what comes next.
    time: int = 0
    known: dict[FakeStream, int] = field(default_factory=dict)

    def learn(self, mark: dict[FakeStream, int]) -> None:
        for stream, time in mark.items():
            self.known[stream] = max(self.known.get(stream, 0), time)

    def has_waited(self, stream: FakeStream, time: int) -> bool:
        return stream is self or self.known.get(stream, 0) >= time


class FakeEvent:
    """Done when the host waits for it, not before; or when the host asks, if the device is
    `fast`."""

    def __init__(
        self,
        host: FakeStream,
        arrived: Callable[[], None],
        called: Callable[[str], None],
        fast: Callable[[], bool],
    ) -> None:
        self._host = host
        self._arrived = arrived
        self._called = called
        self._fast = fast
        self._mark: dict[FakeStream, int] | None = None

    def record(self, stream: FakeStream) -> None:
        self._called("Event.record")
        self._mark = {**stream.known, stream: stream.time}

    def wait(self, stream: FakeStream) -> None:
        self._called("Event.wait")
        stream.learn(self._recorded())

    def query(self) -> bool:
        self._called("Event.query")
        marks = self._recorded().items()
        done = self._fast() or all(self._host.has_waited(*mark) for mark in marks)
        if done:
            self._host.learn(self._recorded())
            self._arrived()
        return done

    def synchronize(self) -> None:
        self._called("Event.synchronize")
        self._host.learn(self._recorded())
        self._arrived()

    def _recorded(self) -> dict[FakeStream, int]:
        if self._mark is None:
            raise StreamOrderError("an event was waited for before it was recorded")
        return self._mark


@dataclass(slots=True)
class _Memory:
    ref: WeakStorage
    writer: tuple[FakeStream, int] | None = None
    readers: dict[FakeStream, int] = field(default_factory=dict)


class Memories:
    """Who touched which storage last."""

    def __init__(self) -> None:
        self._memories: dict[int, _Memory] = {}

    def touch(
        self,
        stream: FakeStream,
        what: str,
        reads: Iterable[torch.UntypedStorage],
        writes: Iterable[torch.UntypedStorage],
    ) -> None:
        """`stream` does the next piece of its work on these. Raises `StreamOrderError`."""
        stream.time += 1
        for storage in reads:
            memory = self._of(storage)
            self._check(stream, what, "reads what", memory.writer)
            memory.readers[stream] = stream.time
        for storage in writes:
            memory = self._of(storage)
            self._check(stream, what, "overwrites what", memory.writer)
            for reader in memory.readers.items():
                self._check(stream, what, "overwrites under", reader)
            memory.writer, memory.readers = (stream, stream.time), {}
        if len(self._memories) > 4096:
            kept = self._memories.items()
            self._memories = {key: memory for key, memory in kept if not memory.ref.freed}

    def written_before(self, stream: FakeStream, what: str, storage: torch.UntypedStorage) -> None:
        """`stream` has waited for whoever wrote this last. Raises `StreamOrderError`."""
        self._check(stream, what, "reads what", self._of(storage).writer)

    def _of(self, storage: torch.UntypedStorage) -> _Memory:
        # A reference keeps the key from being another storage's.
        memory = self._memories.get(storage._cdata)
        if memory is None or memory.ref.freed:
            memory = self._memories[storage._cdata] = _Memory(WeakStorage(storage))
        return memory

    @staticmethod
    def _check(
        stream: FakeStream, what: str, does: str, other: tuple[FakeStream, int] | None
    ) -> None:
        if other is not None and not stream.has_waited(*other):
            raise StreamOrderError(
                f"{what} on {stream.name} {does} {other[0].name} has not been waited for"
            )
