"""Calls of native functions, which a `Recording` repeats without Python's part of them.

Python takes longer to make the calls of a decode step than a small model's numbers take. Their
arguments are addresses and sizes, and the same in each step of as many rows where the tensors stay
where they are.
"""

from __future__ import annotations

import ctypes
import functools
import struct
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from importlib import import_module
from math import inf, prod
from typing import Any, Final

import numpy as np
import torch

from asyncinfer.kernels.dispatch import CannotRecord
from asyncinfer.kernels.native.host import Host, compiled, host

__all__ = [
    "ALWAYS",
    "NEVER",
    "Arena",
    "NativeFunction",
    "RecordedCalls",
    "Recording",
    "empty",
    "float_bits",
    "room_threads",
]

#: Lengths of the longest row above which a call takes all threads.
ALWAYS: Final = -1.0
NEVER: Final = inf

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
#: Numbers of the arena's smallest part, and the multiple that each tensor takes of them: a line of
#: the cache.
_PART, _LINE = 1 << 16, 16


class NativeFunction:
    """A native function whose one argument is the address of a task: a field of 64 bits for each
    address and number."""

    __slots__ = ("_address", "_call", "_task", "_threads")

    def __init__(self, address: int, fields: int, threads: int | None = None) -> None:
        """`fields`: how many a task has; `threads`: which of them says how many threads the call
        takes, None for one thread."""
        self._address = address
        self._call = ctypes.CFUNCTYPE(None, ctypes.c_void_p)(address)
        self._task = ctypes.c_int64 * fields
        self._threads = threads

    def __call__(self, *fields: int, shared_above: float = NEVER) -> None:
        """Call it with these fields. A recording has it take all threads where the longest row has
        more tokens than `shared_above`."""
        recording = _own.recording
        if recording is not None:
            recording.add(self._address, fields, self._threads, shared_above)
        task = self._task(*fields)
        self._call(ctypes.addressof(task))


def float_bits(number: float) -> int:
    """A field that holds a float32 number."""
    return int.from_bytes(struct.pack("<f", number), "little")


def empty(*shape: int, dtype: torch.dtype | None = None) -> torch.Tensor:
    """A tensor, float32 (None) or bfloat16, for what a native function writes; a recording's, where
    one is made."""
    recording = _own.recording
    if recording is not None:
        return recording.empty(shape, dtype or torch.float32)
    return torch.empty(shape, dtype=dtype or torch.float32)


def room_threads(threads: int) -> int:
    """For how many threads a call that takes `threads` needs room. A recording may be replayed on
    more."""
    recording = _own.recording
    return threads if recording is None else recording.most_threads


class Arena:
    """The memory of recorded tensors, which recordings that never run at the same time share.

    Each layer takes one half and the next layer the other one, which still holds its input."""

    __slots__ = ("_halves", "_place", "_side")

    def __init__(self) -> None:
        self._halves: tuple[list[torch.Tensor], list[torch.Tensor]] = ([], [])
        self.begin()

    def begin(self) -> None:
        """Begin a recording."""
        self._side, self._place = 0, (0, 0)

    def turn(self) -> None:
        """Begin the next layer."""
        self._side, self._place = 1 - self._side, (0, 0)

    def take(self, shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
        """A tensor of this shape, float32 or bfloat16."""
        half, (part, start) = self._halves[self._side], self._place
        floats = prod(shape) if dtype is torch.float32 else -(-prod(shape) // 2)
        count = -(-floats // _LINE) * _LINE
        while part < len(half) and start + count > len(half[part]):
            part, start = part + 1, 0
        if part == len(half):
            half.append(_aligned(max(count, _PART)))
        self._place = part, start + count
        return half[part][start : start + count].view(dtype)[: prod(shape)].view(*shape)


def _aligned(count: int) -> torch.Tensor:
    """So many float32 numbers from the begin of a cache's line on. numpy's memory, because torch's
    operators are refused while calls are recorded."""
    memory = np.empty(count + _LINE, np.float32)
    return torch.from_numpy(memory[-(memory.ctypes.data // 4) % _LINE :][:count])


class Recording:
    """Native calls as they are made. `made` gives what replays them.

    Args:
        most_threads: those that a replay may take.
    """

    def __init__(self, arena: Arena, most_threads: int) -> None:
        self.most_threads = most_threads
        self._arena = arena
        self._calls: list[tuple[int, Sequence[int], int | None, float]] = []
        #: For each layer, the calls until its end.
        self._ends: list[int] = []
        arena.begin()

    @contextmanager
    def begun(self) -> Iterator[None]:
        """Record what this thread calls inside the block. An operator of torch that computes or
        copies anything raises `CannotRecord`."""
        _own.recording = self
        try:
            with _views_only():
                yield
        finally:
            _own.recording = None

    def end_layer(self) -> None:
        self._ends.append(len(self._calls))
        self._arena.turn()

    def add(
        self, address: int, fields: Sequence[int], threads: int | None, shared_above: float
    ) -> None:
        self._calls.append((address, fields, threads, shared_above))

    def empty(self, shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
        return self._arena.take(shape, dtype)

    def made(self) -> RecordedCalls:
        """What was recorded. Raises `CannotRecord` where this processor has no native code."""
        target = host()
        if target is None:
            raise CannotRecord("no native code")
        return RecordedCalls(self._calls, self._ends, self._arena, target)


class RecordedCalls:
    """Calls that run one after the other without Python. Whoever replays them keeps the tensors
    that the recording did not make."""

    __slots__ = ("_above", "_arena", "_calls", "_ends", "_run", "_shared", "_tasks", "_work")

    def __init__(
        self,
        calls: Sequence[tuple[int, Sequence[int], int | None, float]],
        ends: Sequence[int],
        arena: Arena,
        target: Host,
    ) -> None:
        starts = np.cumsum([0, *(len(fields) for _, fields, *_ in calls)])
        shared = [
            (start + threads, above)
            for start, (*_, threads, above) in zip(starts, calls, strict=False)
            if threads is not None
        ]
        #: The fields as they were: a call counts in them.
        self._tasks = np.array([field for _, fields, *_ in calls for field in fields], np.int64)
        self._work = self._tasks.copy()
        self._shared = np.array([place for place, _ in shared], np.int64)
        self._above = np.array([above for _, above in shared])
        places = self._work.ctypes.data + 8 * starts[:-1]
        addresses = np.array([address for address, *_ in calls], np.int64)
        self._calls = np.stack((addresses, places), axis=1)
        self._ends = list(ends)
        # Its memory is what the calls write.
        self._arena = arena
        self._run = _run(target)

    def replay(self, threads: int, longest: int) -> None:
        """Make all calls, on so many threads where these pay for rows of at most `longest`
        tokens."""
        self._begin(threads, longest)
        self._run(self._calls.ctypes.data, len(self._calls))

    def replay_layers(self, threads: int, longest: int) -> Iterator[None]:
        """`replay`, a layer at each step of the iterator."""
        self._begin(threads, longest)
        start = 0
        for end in self._ends:
            self._run(self._calls.ctypes.data + 16 * start, end - start)
            start = end
            yield

    def _begin(self, threads: int, longest: int) -> None:
        self._work[:] = self._tasks
        self._work[self._shared] = np.where(self._above < longest, threads, 1)


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


@functools.cache
def _run(target: Host) -> Any:
    """`run(calls, count)`."""
    (address,) = compiled("run", lambda: _RUN, target, ("run",), {})
    return ctypes.CFUNCTYPE(None, ctypes.c_void_p, ctypes.c_int64)(address)
