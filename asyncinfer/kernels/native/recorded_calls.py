"""`RecordedCalls` make calls of native functions without Python's part of them."""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import inf
from typing import Any, Final, NamedTuple

import numpy as np
import numpy.typing as npt

from asyncinfer.kernels.dispatch import CannotRecord
from asyncinfer.kernels.native.arena import aligned
from asyncinfer.kernels.native.host import Host, compiled
from asyncinfer.kernels.native.team_code import (
    ALONE,
    CALL_FIELDS,
    FREE,
    IN_PARTS,
    SHARED,
    SYMBOLS,
    team_code,
)

__all__ = ["ChunkKV", "RecordedCall", "RecordedCalls", "TeamFunctions", "team_functions"]

I64 = npt.NDArray[np.int64]
_KIND: Final = CALL_FIELDS.index("kind")


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

    share: int
    fields: Sequence[int]
    rows: int | None
    turn: int | None
    shared_above: float
    most_rows: float
    of_chunk: Mapping[int, Callable[[ChunkKV], int]]
    states: int | None
    parts: int


class RecordedCalls:
    """Calls that run one after the other without Python. Whoever replays them keeps the tensors
    that the recording did not make.

    Attributes:
        most_rows: rows of a step beyond which other code than the recorded calls is faster.
        in_parts: whether threads do what one of them leaves undone when it loses its core.
    """

    __slots__ = (
        *("_above", "_memory", "_calls", "_chunk", "_ends", "_given", "_kinds", "_run", "_source"),
        *("_tasks", "_work", "in_parts", "most_rows"),
    )

    def __init__(
        self,
        calls: Sequence[RecordedCall],
        ends: Sequence[int],
        memory: object,
        run: Any,
        chunk: ChunkKV | None = None,
    ) -> None:
        """`memory`: what the calls write; `run`: the function of `team_code`."""
        self._source = calls
        starts = np.cumsum([0, *(len(call.fields) for call in calls)])
        fields = [field for call in calls for field in call.fields]
        #: The fields as they were, and a state for each part: calls count in them.
        self._tasks = np.array(fields + [FREE] * sum(call.parts for call in calls), np.int64)
        self._work = self._tasks.copy()
        states = self._work.ctypes.data + 8 * len(fields)
        for start, call in zip(starts.tolist(), calls, strict=False):
            if call.states is not None:
                self._tasks[start + call.states] = states
                states += 8 * call.parts
        self._above = np.array([call.shared_above for call in calls])
        self._kinds = np.array([IN_PARTS if call.parts else SHARED for call in calls], np.int64)
        self._chunk = None if chunk is None else _ChunkFields(calls, starts, self._tasks, chunk)
        #: `CALL_FIELDS` of all calls as they are given, and those that are in use.
        self._given = np.zeros((len(calls), len(CALL_FIELDS)), np.int64)
        self._given[:, 0] = [call.share for call in calls]
        self._given[:, 1] = self._work.ctypes.data + 8 * starts[:-1]
        self._calls = aligned(self._given.size, np.int64).reshape(self._given.shape)
        self._ends = list(ends)
        self.in_parts = any(call.parts for call in calls)
        # Calls for decode rows alone have as many in every step.
        decodes = None if chunk is None else chunk.rows
        counted = (c for c in calls if c.rows is None or c.fields[c.rows] != decodes)
        self.most_rows = min((call.most_rows for call in counted), default=inf)
        self._memory = memory
        self._run = run

    @classmethod
    def joined(cls, parts: Sequence[RecordedCalls]) -> RecordedCalls:
        """The calls of all parts, none of which has a chunk, one after the other."""
        calls: list[RecordedCall] = []
        ends: list[int] = []
        for part in parts:
            assert part._chunk is None
            ends += [len(calls) + end for end in part._ends]
            calls += part._source
        return cls(calls, ends, [part._memory for part in parts], parts[0]._run)

    def replay(self, threads: int, longest: int, chunk: ChunkKV | None = None) -> None:
        """Make all calls, on so many threads where these pay for rows of at most `longest`
        tokens. `chunk`: that of the step, after as many rows as the recording's."""
        self._begin(threads, longest, chunk)
        self._run(self._task(0, len(self._calls), threads).ctypes.data)

    def task(self, threads: int, longest: int) -> I64:
        """What `run` takes to make all calls, as `replay` does. It is for one run, which ends
        before this is called again."""
        self._begin(threads, longest, None)
        return self._task(0, len(self._calls), threads)

    def replay_layers(
        self, threads: int, longest: int, chunk: ChunkKV | None = None
    ) -> Iterator[None]:
        """`replay`, a layer at each step of the iterator."""
        self._begin(threads, longest, chunk)
        start = 0
        for end in self._ends:
            self._run(self._task(start, end, threads).ctypes.data)
            start = end
            yield

    def _begin(self, threads: int, longest: int, chunk: ChunkKV | None) -> None:
        self._work[:] = self._tasks
        self._calls[:] = self._given
        self._calls[:, _KIND] = np.where(self._above < longest, self._kinds, ALONE)
        if self._chunk is not None and chunk is not None:
            self._chunk.write(self._work, chunk)

    def _task(self, start: int, end: int, threads: int) -> I64:
        """The calls from `start` to `end`. Threads that have nothing to do are not woken."""
        if not self._calls[start:end, _KIND].any():
            threads = 1
        return np.array([self._calls[start:].ctypes.data, end - start, threads], np.int64)


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


class TeamFunctions(NamedTuple):
    """The functions of `team_code`, whose one argument is an address."""

    run: Any
    serve: Any


@functools.cache
def team_functions(target: Host, region: int) -> TeamFunctions:
    """`region`: the address of `GOMP_parallel`. Raises `RuntimeError` where they cannot be made."""
    symbols = {"GOMP_parallel": region}
    library = ctypes.CDLL(None)
    for name in SYMBOLS:
        symbols[name] = ctypes.cast(getattr(library, name), ctypes.c_void_p).value or 0
    found = compiled("team", team_code, target, ("run", "serve"), symbols)
    return TeamFunctions(*map(ctypes.CFUNCTYPE(None, ctypes.c_void_p), found))
