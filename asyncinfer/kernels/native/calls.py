"""Calls of native functions, which a `Recording` repeats without Python's part of them.

Python takes longer to make the calls of a decode step than a small model's numbers take. Their
arguments are addresses and sizes. They are the same in each step of as many rows where the tensors
stay where they are, but for those that depend on a chunk of a prompt (`ChunkKV`).
"""

from __future__ import annotations

import ctypes
import functools
import struct
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from importlib import import_module
from math import inf
from typing import Any, Final

import torch

from asyncinfer.kernels.dispatch import CannotRecord
from asyncinfer.kernels.native.arena import Arena
from asyncinfer.kernels.native.host import Host, compiled, host
from asyncinfer.kernels.native.recorded_calls import (
    ChunkKV,
    RecordedCall,
    RecordedCalls,
    TeamFunctions,
    team_functions,
)
from asyncinfer.kernels.native.tasks import share_of
from asyncinfer.kernels.native.threads import parallel_region

__all__ = [
    "ALWAYS",
    "NEVER",
    "NativeFunction",
    "Recording",
    "empty",
    "float_bits",
    "is_recording",
    "native_functions",
    "room_rows",
    "room_threads",
    "team",
]

#: Lengths of the longest row above which a call takes all threads.
ALWAYS: Final = -1.0
NEVER: Final = inf


class NativeFunction:
    """A native function whose one argument is the address of a task: a field of 64 bits for each
    address and number."""

    __slots__ = ("_call", "_rows", "_share", "_states", "_task", "_turn")

    def __init__(
        self,
        address: int,
        share: int,
        fields: Sequence[str],
        rows: str | None = None,
        turn: str | None = None,
    ) -> None:
        """`share`: the address of the function that does one thread's share; `fields`: names of a
        task's; `rows`: that of the field that counts rows, each of which is computed by itself,
        None where a recording must be of all rows; `turn`: that of the field of the rows that a
        thread takes at a time, if there is one. A field "states" is for the address of an int64 for
        each part of the work, see `team_code`."""

        def place(name: str | None) -> int | None:
            return fields.index(name) if name in fields else None

        self._share = share
        self._rows, self._turn, self._states = place(rows), place(turn), place("states")
        self._call = ctypes.CFUNCTYPE(None, ctypes.c_void_p)(address)
        self._task = ctypes.c_int64 * len(fields)

    def __call__(
        self,
        *fields: int,
        shared_above: float = NEVER,
        most_rows: float = inf,
        of_chunk: Mapping[int, Callable[[ChunkKV], int]] | None = None,
        parts: int = 0,
    ) -> None:
        """Call it with these fields, or record the call. A replay has it take all threads where the
        longest row has more tokens than `shared_above`, is not made for more than `most_rows`, and
        has the fields of `of_chunk` fit its chunk. `parts`: the most that its work has, where it
        has a state for each."""
        recording = _own.recording
        if recording is not None:
            recording.add(
                RecordedCall(
                    *(self._share, fields, self._rows, self._turn, shared_above, most_rows),
                    *(of_chunk or {}, self._states, parts),
                )
            )
            return
        task = self._task(*fields)
        self._call(ctypes.addressof(task))


def native_functions(
    what: str,
    text: Callable[[], str],
    target: Host,
    region: int,
    fields: Mapping[str, Sequence[str]],
    rows: str | None = None,
    turn: str | None = None,
) -> dict[str, NativeFunction]:
    """Functions of LLVM's assembly `text()` by their names, which `Assembly.on_task` has made.
    `region`: the address of `GOMP_parallel`; `fields`: each function's. Raises `RuntimeError` where
    the code cannot be made."""
    names = [*fields, *map(share_of, fields)]
    found = compiled(what, text, target, names, {"GOMP_parallel": region})
    places = dict(zip(names, found, strict=True))
    return {
        name: NativeFunction(places[name], places[share_of(name)], its, rows, turn)
        for name, its in fields.items()
    }


def float_bits(number: float) -> int:
    """A field that holds a float32 number."""
    return int.from_bytes(struct.pack("<f", number), "little")


def empty(*shape: int, dtype: torch.dtype | None = None) -> torch.Tensor:
    """A tensor, float32 if `dtype` is None, for what a native function writes; a recording's, where
    one is made."""
    recording = _own.recording
    if recording is not None:
        return recording.empty(shape, dtype or torch.float32)
    return torch.empty(shape, dtype=dtype or torch.float32)


def is_recording() -> bool:
    """Whether calls are recorded, and not made."""
    return _own.recording is not None


def room_rows(rows: int) -> int:
    """For how many rows a call for `rows` may be made. A recording may be replayed for more."""
    recording = _own.recording
    return rows if recording is None else recording.room_rows(rows)


def room_threads(threads: int) -> int:
    """For how many threads a call that takes `threads` needs room. A recording may be replayed on
    more."""
    recording = _own.recording
    return threads if recording is None else recording.most_threads


class Recording:
    """Native calls, which are not made: nothing may look at their results. `made` gives what makes
    them.

    Args:
        most_threads: those that a replay may take.
        chunk: that of the calls, if they have one. It has not as many tokens as rows.
        most_tokens: those of a chunk that a replay may have.
    """

    def __init__(
        self,
        arena: Arena,
        most_threads: int,
        chunk: ChunkKV | None = None,
        most_tokens: int = 0,
    ) -> None:
        self.most_threads = most_threads
        self._arena = arena
        self._chunk = chunk
        self._most_tokens = most_tokens
        #: Rows that tensors have room for at least, so that recordings of fewer share memory.
        self.least_rows = 0
        self._calls: list[RecordedCall] = []
        #: For each layer, the calls until its end.
        self._ends: list[int] = []
        arena.begin()

    @contextmanager
    def begun(self) -> Iterator[None]:
        """Record what this thread would call inside the block. An operator of torch that computes
        or copies anything raises `CannotRecord`."""
        _own.recording = self
        try:
            with _views_only():
                yield
        finally:
            _own.recording = None

    def end_layer(self) -> None:
        self._ends.append(len(self._calls))
        self._arena.turn()

    def add(self, call: RecordedCall) -> None:
        self._calls.append(call)

    def empty(self, shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
        """A tensor; of one of rows the first ones, with room for those of the longest chunk."""
        count, *others = shape
        rows = max(self.room_rows(count), self.least_rows) if others else count
        return self._arena.take((rows, *others), dtype)[:count]

    def room_rows(self, count: int) -> int:
        """The rows that a call for `count` rows may have in a replay."""
        chunk = self._chunk
        if chunk is None or count % (chunk.rows + chunk.tokens):
            return count
        return count // (chunk.rows + chunk.tokens) * (chunk.rows + self._most_tokens)

    def made(self) -> RecordedCalls:
        """What was recorded. Raises `CannotRecord` where this processor has no native code."""
        run = team().run
        return RecordedCalls(self._calls, self._ends, self._arena, run, self._chunk)


def team() -> TeamFunctions:
    """`team_functions` of this machine, compiled by the first caller. Raises `CannotRecord` where
    there is no native code."""
    target, region = host(), parallel_region()
    if target is None or region is None:
        raise CannotRecord("no native code")
    return team_functions(target, region)


@functools.cache
def _views_only() -> Any:
    """A mode that lets operators through whose results are views of what they are given. Made when
    it is first needed, since its base imports torch, which commands of the CLI do without."""
    mode: Any = import_module("torch.utils._python_dispatch").TorchDispatchMode

    def dispatch(self: Any, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        given = [each for each in args if isinstance(each, torch.Tensor)]
        # A weight in oneDNN's layout has no storage to look at.
        strided = all(each.layout is torch.strided for each in given)
        if func._schema.is_mutable or not given or not strided:
            raise CannotRecord(str(func))
        result = func(*args, **(kwargs or {}))
        places = {each.untyped_storage().data_ptr() for each in given}
        for each in result if isinstance(result, list | tuple) else [result]:
            plain = isinstance(each, torch.Tensor)
            if not plain or each.untyped_storage().data_ptr() not in places:
                raise CannotRecord(str(func))
        return result

    kind = type("ViewsOnly", (mode,), {})
    # Set later: torch wraps what the class is made with, and the wrapper imports torch's compiler,
    # which would hold up the first answer for more than a second.
    kind.__torch_dispatch__ = dispatch  # type: ignore[attr-defined]
    return kind()


class _Own(threading.local):
    """The recording of one thread."""

    recording: Recording | None = None


_own = _Own()
