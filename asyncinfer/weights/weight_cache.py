"""`WeightCache`: a folder of copies of weights in a CPU's layout, for later starts."""

from __future__ import annotations

import os
import stat
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Any, Final

from asyncinfer.kernels.kept import kept_path, open_regular
from asyncinfer.kernels.onednn_memory import can_place
from asyncinfer.stats import LoadProgress
from asyncinfer.weights.weight_copy import CopyFault, MappedCopy, WrittenCopy

__all__ = ["WeightCache"]

_SUFFIX: Final = ".safetensors"
_HALF_WRITTEN: Final = ".new"
#: Seconds after its use within which a copy is not removed for another one.
_IN_USE: Final = 600
#: How often a file is begun that other processes remove.
_ATTEMPTS: Final = 8
#: Bits of a file's mode that let others write to it.
_OTHERS_WRITE: Final = stat.S_IWGRP | stat.S_IWOTH


@dataclass(frozen=True, slots=True)
class WeightCache:
    """Copies of the models that were used last, each readable by its owner alone."""

    #: The most bytes of all copies.
    most_bytes: int
    #: None: the user's cache folder.
    folder: Path | None = None

    def open(
        self, key: Mapping[str, str], progress: Callable[[LoadProgress], None] | None = None
    ) -> MappedCopy | WrittenCopy:
        """The copy that was kept for `key`, its pages in memory; a new one where there is none that
        this user wrote. `key` names everything that the weights' bytes depend on."""
        return self._found(key, progress) or WrittenCopy(key)

    def _found(
        self, key: Mapping[str, str], progress: Callable[[LoadProgress], None] | None
    ) -> MappedCopy | None:
        if _fault() is not None:
            return None
        path = self._path(key)
        try:
            with open_regular(path) as file:
                state = os.fstat(file.fileno())
                if state.st_uid != os.geteuid() or state.st_mode & _OTHERS_WRITE:
                    return None
                copy = MappedCopy(file, key)
        except (OSError, CopyFault, RuntimeError):
            return None
        with suppress(OSError):
            os.utime(path)
        copy.read(progress)
        return copy

    def keep(self, copy: WrittenCopy) -> str | None:
        """Write a copy, unless another process is writing it, and remove those that were used
        longest ago, if all then have too many bytes. Returns why nothing was written."""
        if (fault := _fault()) is not None:
            return fault
        if copy.nbytes > self.most_bytes:
            return f"weight_cache_bytes={self.most_bytes} is less than its {copy.nbytes} bytes"
        path = self._path(copy.key)
        try:
            path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            if not self._prune(path, self.most_bytes - copy.nbytes):
                return (
                    f"weight_cache_bytes={self.most_bytes} has no room for its {copy.nbytes} bytes "
                    f"beside copies that were used within {_IN_USE // 60} minutes"
                )
            begun = path.with_suffix(_HALF_WRITTEN)
            handle = _begin(begun)
            if handle is None:
                return None
            # Its lock ends with the block, when it has its name: others remove what nobody locks.
            with os.fdopen(handle, "wb") as file:
                try:
                    # Others see at once how much room it is going to take.
                    os.ftruncate(handle, copy.nbytes)
                    copy.write(file)
                    file.flush()
                    # Else a machine that stops could leave a file without its content.
                    os.fsync(handle)
                    os.replace(begun, path)
                except BaseException:
                    with suppress(OSError):
                        os.unlink(begun)
                    raise
        except OSError as error:
            return f"{path.parent}: {error.strerror or error}"
        except RuntimeError as error:
            return f"torch does not tell its layout: {error}"
        return None

    def _path(self, key: Mapping[str, str]) -> Path:
        return kept_path("weights", key, self.folder).with_suffix(_SUFFIX)

    def _prune(self, new: Path, most: int) -> bool:
        """Remove what was used longest ago, until copies of at most so many bytes are left beside
        `new`, and files that nobody finished. False: those in use have more. A model and its draft
        would else take each other's place at each start."""
        found = []
        for path in new.parent.iterdir():
            # Another process may remove one first.
            with suppress(OSError):
                state = path.lstat()
                if path.suffix == _SUFFIX and path != new:
                    found.append((state.st_mtime_ns, path, state.st_size))
                elif path.suffix == _HALF_WRITTEN:
                    with open_regular(path) as file:
                        if _locked(file.fileno()):
                            path.unlink()
                        elif path.stem != new.stem:
                            found.append((time.time_ns(), path, state.st_size))
        in_use = time.time_ns() - _IN_USE * 1_000_000_000
        if sum(size for used, _, size in found if used >= in_use) > most:
            return False
        size = 0
        for _, path, more in sorted(found, reverse=True):
            size += more
            if size > most:
                with suppress(OSError):
                    path.unlink()
        return True


def _begin(path: Path) -> int | None:
    """A new file that is locked for this process; None: another one is writing it. Raises
    `OSError`."""
    for _ in range(_ATTEMPTS):
        try:
            handle = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        except FileExistsError:
            return None
        try:
            if _locked(handle) and os.fstat(handle).st_nlink:
                return handle
        except OSError:
            os.unlink(path)
            os.close(handle)
            raise
        # Another process took it for one that nobody finishes, before it was locked.
        os.close(handle)
    return None


def _locked(handle: int) -> bool:
    """Lock a file for its writer, until it is closed. False: somebody else may write to it. Raises
    `OSError` where its file system has no locks."""
    # Only systems with owners of files have it.
    fcntl: Any = import_module("fcntl")
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def _fault() -> str | None:
    """Why this machine has no such copies; None where it can have them."""
    if not hasattr(os, "geteuid"):
        # A file's mode does not say who may write to it.
        return "copies of weights need a system with owners of files"
    return None if can_place() else "this version of torch takes no weights from files"
