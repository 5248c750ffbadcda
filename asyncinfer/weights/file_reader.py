"""`FileReader`: bytes of a checkpoint's files, read by several threads."""

from __future__ import annotations

import os
import threading
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from io import FileIO
from pathlib import Path
from typing import Any, Final, TypeVar

from asyncinfer.errors import ModelLoadError
from asyncinfer.machine import usable_cores

__all__ = ["FileReader"]

Result = TypeVar("Result")

_MOST_THREADS: Final = 8


class FileReader(ABC):
    """The files of a checkpoint. They are read and not mapped, since a mapped file that is cut
    short kills the process where a read is an error, and mapped pages count as memory of the
    process.

    `read` may be called from any thread, until `close`.
    """

    def __init__(self) -> None:
        self._files: dict[str, FileIO] = {}
        self._states: dict[str, tuple[int, int]] = {}
        self._seeking = threading.Lock()
        self._pool: ThreadPoolExecutor | None = None

    @property
    def files(self) -> Mapping[str, FileIO]:
        """The open files by name."""
        return self._files

    @property
    def threads(self) -> int:
        """How many threads `start` uses."""
        return min(_MOST_THREADS, usable_cores())

    @abstractmethod
    def read(self, file: str, tensor: str, offset: int, target: memoryview) -> None:
        """Fill `target` with bytes of `tensor`, from the byte `offset` of its numbers on.
        `ModelLoadError` if the file ends before."""

    def read_raw(self, file: str, tensor: str, offset: int, target: memoryview) -> None:
        """`read`, without conversion: the bytes of the file."""
        self.read(file, tensor, offset, target)

    def add(self, name: str, path: Path) -> FileIO:
        """Open the file that goes by `name` from now on. Raises `OSError`."""
        self._files[name] = file = open(path, "rb", buffering=0)  # noqa: SIM115 - see `close`
        self._states[name] = _state(file)
        return file

    def check_unchanged(self) -> None:
        """`ModelLoadError` if somebody has written to a file since it was opened: part of what was
        read may be of another model. A file that took its name does no harm."""
        for name, file in self._files.items():
            if _state(file) != self._states[name]:
                raise ModelLoadError("was written to while it was read; load it again", file=name)

    def fill(self, file: str, tensor: str, start: int, target: memoryview) -> None:
        """Fill `target` from the byte `start` of the file on. `ModelLoadError`, naming the tensor,
        if the file ends before."""
        done = 0
        while done < len(target):
            try:
                count = self._read_at(file, start + done, target[done:])
            except OSError as error:
                raise ModelLoadError(
                    f"cannot be read: {error}", file=file, tensor=tensor
                ) from error
            if not count:
                raise ModelLoadError(
                    "the file ends within it: it was cut short since it was opened",
                    file=file,
                    tensor=tensor,
                )
            done += count

    def start(self, function: Callable[..., Result], *args: Any) -> Future[Result]:
        """Call `function` on one of the threads."""
        if self._pool is None:
            self._pool = ThreadPoolExecutor(self.threads, thread_name_prefix="asyncinfer-load")
        return self._pool.submit(function, *args)

    def close(self) -> None:
        """End the threads and close the files."""
        if self._pool is not None:
            self._pool.shutdown(wait=True, cancel_futures=True)
        for file in self._files.values():
            file.close()

    def _read_at(self, name: str, start: int, target: memoryview) -> int:
        file = self._files[name]
        if hasattr(os, "preadv"):
            return os.preadv(file.fileno(), [target], start)
        with self._seeking:
            file.seek(start)
            return file.readinto(target)


def _state(file: FileIO) -> tuple[int, int]:
    """Its size and time of change."""
    state = os.fstat(file.fileno())
    return state.st_size, state.st_mtime_ns
