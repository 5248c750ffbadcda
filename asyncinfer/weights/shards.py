"""`ShardReader`: bytes of shards, read by several threads."""

from __future__ import annotations

import json
import os
import stat
import struct
import threading
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from io import FileIO
from operator import index
from pathlib import Path
from typing import Any, Final

from asyncinfer.errors import ModelLoadError
from asyncinfer.weights.json_file import KeyTwice, unique_keys

__all__ = ["ShardReader"]

_MOST_THREADS: Final = 8


class ShardReader:
    """The files of a checkpoint. They are read, not mapped: a mapped file that is cut short kills
    the process, a read one is an error; and what was mapped counts as memory of the process.

    `read` may be called from any thread, until `close`.
    """

    def __init__(self) -> None:
        self._files: dict[str, FileIO] = {}
        #: For each file, where its tensors begin, and their bytes.
        self._spans: dict[str, dict[str, tuple[int, int]]] = {}
        self._seeking = threading.Lock()
        self._pool: ThreadPoolExecutor | None = None

    @property
    def threads(self) -> int:
        """How many `start` uses."""
        usable = (
            len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
        )
        return min(_MOST_THREADS, usable or 1)

    def open(self, name: str, path: Path) -> None:
        """Add the file `name`, whose header was found sound. `ModelLoadError` if it is no more."""
        try:
            self._files[name] = file = open(path, "rb", buffering=0)  # noqa: SIM115 - see `close`
            self._spans[name] = _spans(file)
        except KeyTwice as twice:
            # The library takes it where both say the same.
            raise ModelLoadError("occurs twice", file=name, tensor=twice.key) from None
        except (OSError, ValueError, LookupError, TypeError, RecursionError, struct.error) as error:
            raise ModelLoadError(f"cannot be read: {error}", file=name) from error

    def read(self, file: str, tensor: str, offset: int, target: memoryview) -> None:
        """Fill `target`, of bytes, from `offset` bytes behind the beginning of `tensor`.
        `ModelLoadError` where there are fewer."""
        start, size = self._spans[file].get(tensor, (0, 0))
        if offset + len(target) > size:
            raise ModelLoadError(
                "is not what it was when it was looked at", file=file, tensor=tensor
            )
        done = 0
        while done < len(target):
            try:
                count = self._read_at(file, start + offset + done, target[done:])
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

    def start(self, function: Callable[..., None], *args: Any) -> Future[None]:
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


def _spans(file: FileIO) -> dict[str, tuple[int, int]]:
    """Where each tensor begins, and its bytes. The header was found sound under the file's name,
    but that may be another file by now."""
    found = os.fstat(file.fileno())
    if not stat.S_ISREG(found.st_mode):
        raise ValueError("is not a regular file")
    (length,) = struct.unpack("<Q", file.read(8))
    first = 8 + length
    if first > found.st_size:
        raise ValueError("its header is longer than the file")
    header = json.loads(file.read(length), object_pairs_hook=unique_keys)
    if not isinstance(header, dict):
        raise ValueError("its header is no object")
    spans = {}
    for name, entry in header.items():
        if name != "__metadata__":
            begin, end = map(index, entry["data_offsets"])
            if not 0 <= begin <= end <= found.st_size - first:
                raise ValueError(f"tensor {name} is not in the file")
            spans[name] = first + begin, end - begin
    return spans
