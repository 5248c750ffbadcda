"""The threads on which an engine's operators run on a CPU."""

from __future__ import annotations

import ctypes
import functools
import os
import threading
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Final, TypeVar

import torch

from asyncinfer.machine import read_lines

__all__ = [
    "FEW_TILES",
    "NAME",
    "TASKS",
    "name_thread",
    "one_thread",
    "set_thread_count",
    "share",
    "take_name",
    "thread_name",
]

#: The prefix of the names of threads that compute steps.
NAME: Final = "asyncinfer-"
TASKS: Final = Path("/proc/self/task")
#: The most tiles of like size that are better computed alone. Of three tiles, one of two threads
#: takes two while the other one waits.
FEW_TILES: Final = 3

Item = TypeVar("Item")


def share(items: Iterable[Item], work: Callable[[Item], None], *, alone: bool = False) -> None:
    """Call `work` with each item, on as many threads as the operators of this thread use. Operators
    that `work` calls use one thread each.

    `alone`: call `work` on this thread only, with operators on several threads. Work for a GPU must
    be done alone, since another thread's operators go to another stream.

    An operator on several threads ends when the last of them does. Where another program has the
    core of one thread, the others wait for that thread's next turn, some milliseconds for each
    operator. The threads of `share` wait for each other only once, at the end. A thread that has
    less of a core takes fewer items.

    Raises what `work` raises. Items that are left then are not computed.
    """
    left = list(items)
    left.reverse()
    if alone:
        _work(left, work)
        return
    count = torch.get_num_threads()
    helpers = min(count, len(left)) - 1
    if helpers < 1 or not set_thread_count(1):
        _work(left, work)
        return
    begun: list[Future[None]] = []
    inference = torch.is_inference_mode_enabled()
    try:
        try:
            team = _team(count - 1)
            # One after the other, so that those that have begun are known if another one cannot.
            begun.extend(team.submit(_help, left, work, inference) for _ in range(helpers))
        except RuntimeError:
            # The system has no thread left, so the existing ones compute everything.
            _own.team = None
        _work(left, work)
    finally:
        left.clear()
        set_thread_count(count)
        # What is computed elsewhere reads and writes the caller's tensors.
        errors = [each.exception() for each in begun]
    for error in errors:
        if error is not None:
            raise error


def name_thread() -> None:
    """Name the calling thread for the system's tools. Threads that torch starts for it afterwards
    inherit the name. The main thread keeps its name, which is that of the process."""
    if threading.current_thread() is threading.main_thread():
        return
    _set_name(f"{NAME}{threading.get_native_id() % 10_000}")


def take_name(name: str | None) -> None:
    """Give the calling thread the name of one that it computes a step for."""
    if name is not None and name.startswith(NAME):
        _set_name(name)


def thread_name(ident: int | str) -> str | None:
    """The name that the system shows for a thread of this process, if any."""
    return next(iter(read_lines(TASKS / str(ident) / "comm")), None)


def set_thread_count(count: int) -> bool:
    """Have this thread's operators use `count` threads. Returns whether the number can be set.
    `torch.set_num_threads` is not used, since it also changes threads that have not used torch yet.
    """
    library = _library()
    if library is None:
        return False
    # A thread gets the process's number when it first uses torch, so it has to use torch before.
    torch.get_num_threads()
    library.omp_set_num_threads(count)
    if hasattr(library, "MKL_Set_Num_Threads_Local"):
        library.MKL_Set_Num_Threads_Local(count)
    return True


@contextmanager
def one_thread() -> Iterator[None]:
    """Have this thread's operators use one thread inside the block. A short operator on two threads
    takes a scheduler's quantum if another thread occupies the second one's core."""
    count = torch.get_num_threads()
    changed = set_thread_count(1)
    try:
        yield
    finally:
        if changed:
            set_thread_count(count)


class _Own(threading.local):
    """State of one thread. It ends with the thread, and so do the threads of the team."""

    team: tuple[tuple[int, int], ThreadPoolExecutor] | None = None


_own = _Own()


def _team(size: int) -> ThreadPoolExecutor:
    """Threads that help this one. A forked process has none of its parent's threads."""
    mark = (os.getpid(), size)
    if _own.team is None or _own.team[0] != mark:
        name = thread_name(threading.get_native_id())
        _own.team = mark, ThreadPoolExecutor(size, initializer=_begin, initargs=(name,))
    return _own.team[1]


def _begin(name: str | None) -> None:
    """Begin a thread that helps another one, whose name it takes."""
    take_name(name)
    set_thread_count(1)


def _help(left: list[Item], work: Callable[[Item], None], inference: bool) -> None:
    with torch.inference_mode(inference):
        _work(left, work)


def _work(left: list[Item], work: Callable[[Item], None]) -> None:
    while left:
        try:
            item = left.pop()
        except IndexError:
            # Another thread took the last one.
            return
        try:
            work(item)
        except BaseException:
            left.clear()
            raise


def _set_name(name: str) -> None:
    try:
        # A name has fifteen bytes.
        (TASKS / str(threading.get_native_id()) / "comm").write_text(name, "utf-8")
    except OSError:
        # Not Linux: the names cannot be set, and nothing reads them.
        return


@functools.cache
def _library() -> ctypes.CDLL | None:
    """The library of torch by which its OpenMP and MKL are reached; None where there is none."""
    path = Path(torch.__file__).parent / "lib" / "libtorch_cpu.so"
    try:
        library = ctypes.CDLL(str(path))
        library.omp_set_num_threads.restype = None
    except (OSError, AttributeError):
        return None
    return library
