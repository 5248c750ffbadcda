"""`Deadlines`: the requests that must end at a time, the earliest first."""

from __future__ import annotations

import math
from heapq import heapify, heappop, heappush
from itertools import count
from typing import Any, TypeAlias

from asyncinfer.engine.request import Request

__all__ = ["Deadlines"]

#: Entries without a request that a heap may hold beside those with one.
SLACK = 64

#: `[deadline, order, request]`; the request is None once it was discarded.
_Entry: TypeAlias = list[Any]


class Deadlines:
    """A heap whose entries let go of their requests at once, long before their time comes."""

    def __init__(self) -> None:
        #: Seconds of the engine's clock; inf without a deadline. Read by other threads.
        self.next = math.inf
        self._heap: list[_Entry] = []
        self._entries: dict[Request, _Entry] = {}
        self._order = count()

    def __len__(self) -> int:
        return len(self._entries)

    def add(self, request: Request) -> None:
        """Add a request, whose `deadline` is not None."""
        entry = self._entries[request] = [request.deadline, next(self._order), request]
        heappush(self._heap, entry)
        self._look()

    def discard(self, request: Request) -> None:
        """Forget the request, if it is here."""
        entry = self._entries.pop(request, None)
        if entry is not None:
            entry[2] = None
            if len(self._heap) > 2 * len(self._entries) + SLACK:
                self._heap = [entry for entry in self._heap if entry[2] is not None]
                heapify(self._heap)
            self._look()

    def due(self, now: float) -> list[Request]:
        """Requests whose time has come. They stay here until they are discarded."""
        due: list[Request] = []
        # A copy, since a coroutine that is closed meanwhile discards its request. In a heap only
        # later entries lie below an entry.
        heap, look = self._heap.copy(), [0]
        while look:
            place = look.pop()
            if place < len(heap):
                deadline, _, request = heap[place]
                if deadline <= now:
                    look += (2 * place + 1, 2 * place + 2)
                    if request is not None:
                        due.append(request)
        return sorted(due, key=lambda request: request.deadline or 0.0)

    def _look(self) -> None:
        while self._heap and self._heap[0][2] is None:
            heappop(self._heap)
        self.next = float(self._heap[0][0]) if self._heap else math.inf
