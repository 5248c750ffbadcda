"""`Deadlines`: the requests that must end at a time, the earliest first."""

from __future__ import annotations

import math
from heapq import heapify, heappop, heappush
from itertools import count
from typing import Any, TypeAlias

from asyncinfer.engine.job import Job

__all__ = ["Deadlines"]

#: Entries without a job that a heap may hold beside those with one.
SLACK = 64

#: `[deadline, order, job]`; the job is None once it was discarded.
_Entry: TypeAlias = list[Any]


class Deadlines:
    """A heap whose entries let go of their jobs at once, long before their time comes."""

    def __init__(self) -> None:
        #: Seconds of the engine's clock; inf without a deadline. Read by other threads.
        self.next = math.inf
        self._heap: list[_Entry] = []
        self._entries: dict[Job, _Entry] = {}
        self._order = count()

    def __len__(self) -> int:
        return len(self._entries)

    def add(self, job: Job) -> None:
        """`job.deadline` is not None."""
        entry = self._entries[job] = [job.deadline, next(self._order), job]
        heappush(self._heap, entry)
        self._look()

    def discard(self, job: Job) -> None:
        """Forget the job, if it is here."""
        entry = self._entries.pop(job, None)
        if entry is not None:
            entry[2] = None
            if len(self._heap) > 2 * len(self._entries) + SLACK:
                self._heap = [entry for entry in self._heap if entry[2] is not None]
                heapify(self._heap)
            self._look()

    def due(self, now: float) -> list[Job]:
        """Jobs whose time has come. They stay here until they are discarded."""
        due: list[Job] = []
        # A copy, since a coroutine that is closed meanwhile discards its job. In a heap only later
        # entries lie below an entry.
        heap, look = self._heap.copy(), [0]
        while look:
            place = look.pop()
            if place < len(heap):
                deadline, _, job = heap[place]
                if deadline <= now:
                    look += (2 * place + 1, 2 * place + 2)
                    if job is not None:
                        due.append(job)
        return sorted(due, key=lambda job: job.deadline or 0.0)

    def _look(self) -> None:
        while self._heap and self._heap[0][2] is None:
            heappop(self._heap)
        self.next = float(self._heap[0][0]) if self._heap else math.inf
