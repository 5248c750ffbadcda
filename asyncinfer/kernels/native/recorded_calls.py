"""`RecordedCalls` make calls of native functions without Python's part of them."""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import inf
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from asyncinfer.kernels.dispatch import CannotRecord
from asyncinfer.kernels.native.arena import Arena
from asyncinfer.kernels.native.host import Host, compiled

__all__ = ["ChunkKV", "RecordedCall", "RecordedCalls"]

I64 = npt.NDArray[np.int64]

#: Runs calls one after the other: `calls` are pairs of a function's address and its task's.
_RUN: Final = """
define void @run(ptr %calls, i64 %count) {
begin:
  br label %next
next:
  %index = phi i64 [ 0, %begin ], [ %following, %call ]
  %more = icmp slt i64 %index, %count
  br i1 %more, label %call, label %end
call:
  %offset = shl i64 %index, 4
  %pair = getelementptr i8, ptr %calls, i64 %offset
  %function = load ptr, ptr %pair, align 8
  %second = getelementptr i8, ptr %pair, i64 8
  %task = load ptr, ptr %second, align 8
  call void %function(ptr %task)
  %following = add i64 %index, 1
  br label %next
end:
  ret void
}
"""


@dataclass(frozen=True, slots=True)
class ChunkKV:
    """A chunk of a prompt after the decode rows of a step, and the contiguous keys and values that
    it attends to. Steps that share a recording differ in all but `rows`."""

    #: Query tokens of the decode rows, and of the chunk.
    rows: int
    tokens: int
    #: The position of the chunk's first token.
    start: int
    #: Where the keys and values are, and their bytes.
    address: int
    nbytes: int
    #: Bytes of a head's keys in one layer. Heads lie side by side.
    head_bytes: int


@dataclass(frozen=True, slots=True)
class RecordedCall:
    """A call with its fields. The others are of `NativeFunction`."""

    address: int
    fields: Sequence[int]
    threads: int | None
    rows: int | None
    turn: int | None
    shared_above: float
    most_rows: float
    of_chunk: Mapping[int, Callable[[ChunkKV], int]]


class RecordedCalls:
    """Calls that run one after the other without Python. Whoever replays them keeps the tensors
    that the recording did not make.

    Attributes:
        most_rows: rows of a step beyond which other code than the recorded calls is faster.
    """

    __slots__ = (
        *("_above", "_arena", "_calls", "_chunk", "_ends", "_run", "_shared", "_tasks", "_work"),
        "most_rows",
    )

    def __init__(
        self,
        calls: Sequence[RecordedCall],
        ends: Sequence[int],
        arena: Arena,
        target: Host,
        chunk: ChunkKV | None = None,
    ) -> None:
        starts = np.cumsum([0, *(len(call.fields) for call in calls)])
        shared = [
            (start + call.threads, call.shared_above)
            for start, call in zip(starts, calls, strict=False)
            if call.threads is not None
        ]
        #: The fields as they were: a call counts in them.
        self._tasks = np.array([field for call in calls for field in call.fields], np.int64)
        self._work = self._tasks.copy()
        self._shared = np.array([place for place, _ in shared], np.int64)
        self._above = np.array([above for _, above in shared])
        self._chunk = None if chunk is None else _ChunkFields(calls, starts, self._tasks, chunk)
        places = self._work.ctypes.data + 8 * starts[:-1]
        addresses = np.array([call.address for call in calls], np.int64)
        self._calls = np.stack((addresses, places), axis=1)
        self._ends = list(ends)
        self.most_rows = min((call.most_rows for call in calls), default=inf)
        # Its memory is what the calls write.
        self._arena = arena
        self._run = _run(target)

    def replay(self, threads: int, longest: int, chunk: ChunkKV | None = None) -> None:
        """Make all calls, on so many threads where these pay for rows of at most `longest`
        tokens. `chunk`: that of the step, after as many rows as the recording's."""
        self._begin(threads, longest, chunk)
        self._run(self._calls.ctypes.data, len(self._calls))

    def replay_layers(
        self, threads: int, longest: int, chunk: ChunkKV | None = None
    ) -> Iterator[None]:
        """`replay`, a layer at each step of the iterator."""
        self._begin(threads, longest, chunk)
        start = 0
        for end in self._ends:
            self._run(self._calls.ctypes.data + 16 * start, end - start)
            start = end
            yield

    def _begin(self, threads: int, longest: int, chunk: ChunkKV | None) -> None:
        self._work[:] = self._tasks
        self._work[self._shared] = np.where(self._above < longest, threads, 1)
        if self._chunk is not None and chunk is not None:
            self._chunk.write(self._work, chunk)


class _ChunkFields:
    """The fields of recorded calls that depend on a chunk."""

    def __init__(
        self, calls: Sequence[RecordedCall], starts: I64, fields: I64, chunk: ChunkKV
    ) -> None:
        """`starts`: each call's first field. Raises `CannotRecord` where a call is not of rows that
        can be counted."""
        counted, turns = [], []
        #: The fields that a call says how to compute.
        self._others: list[tuple[int, Callable[[ChunkKV], int]]] = []
        every = chunk.rows + chunk.tokens
        for start, call in zip(starts.tolist(), calls, strict=False):
            if call.rows is None:
                raise CannotRecord("a call that is not of rows")
            count = call.fields[call.rows]
            if count == chunk.rows:
                continue
            if count % every and count != chunk.tokens:
                raise CannotRecord(f"a call for {count} of {every} rows")
            times = (0, 1) if count % every else (count // every, 0)
            counted.append((start + call.rows, *times))
            if call.turn is not None:
                turns.append((start + call.turn, len(counted) - 1, call.fields[call.turn] / count))
            self._others += [(start + field, value) for field, value in call.of_chunk.items()]
        #: Fields that count rows: how often they count all of a step's, and the chunk's.
        self._rows, *self._times = np.array(counted, np.int64).reshape(-1, 3).T
        #: Fields of rows at a time, which of the counts they belong to, and their share of it.
        self._turns = np.array([place for place, *_ in turns], np.int64)
        self._turn_rows = np.array([number for _, number, _ in turns], np.int64)
        self._shares = np.array([share for *_, share in turns])
        #: Fields that are addresses of keys or values, and how many heads are before each.
        offsets = fields - chunk.address
        (self._inside,) = np.nonzero((offsets >= 0) & (offsets < chunk.nbytes))
        self._heads, rest = np.divmod(offsets[self._inside], chunk.head_bytes)
        if rest.any():
            raise CannotRecord("an address within a head")

    def write(self, work: I64, chunk: ChunkKV) -> None:
        """Write the fields for `chunk`."""
        for place, value in self._others:
            work[place] = value(chunk)
        of_all, of_chunk = self._times
        rows = of_all * (chunk.rows + chunk.tokens) + of_chunk * chunk.tokens
        work[self._rows] = rows
        work[self._turns] = np.ceil(rows[self._turn_rows] * self._shares)
        work[self._inside] = chunk.address + self._heads * chunk.head_bytes


@functools.cache
def _run(target: Host) -> Any:
    """`run(calls, count)`."""
    (address,) = compiled("run", lambda: _RUN, target, ("run",), {})
    return ctypes.CFUNCTYPE(None, ctypes.c_void_p, ctypes.c_int64)(address)
