"""Earlier findings about this machine, kept as files in the user's cache folder."""

from __future__ import annotations

import hashlib
import json
import os
import re
import stat
import tempfile
from collections.abc import Mapping
from contextlib import suppress
from io import FileIO
from pathlib import Path
from typing import Any, Final

from platformdirs import user_cache_path

__all__ = [
    "forget",
    "keep",
    "kept_path",
    "open_regular",
    "read_kept",
    "read_regular",
    "write_whole",
]

#: The most files and bytes of a folder: each version of torch, LLVM or this package adds some.
MOST_FILES: Final = 256
MOST_FOLDER_BYTES: Final = 1 << 26
#: The most bytes of a file that is read. Files of this package are far smaller.
_MOST_BYTES: Final = 16_384
#: The names of this package's files, and their temporary names while they are written.
_OURS: Final = re.compile(r"[0-9a-f]{32}\.(json|o)|tmp\w+\.new")
#: Flags by which opening follows no link and never blocks, where the system has them.
_WITHOUT_WAITING: Final = sum(
    getattr(os, name, 0) for name in ("O_NOFOLLOW", "O_NONBLOCK", "O_CLOEXEC", "O_BINARY")
)


def kept_path(kind: str, key: Mapping[str, str], folder: Path | None = None) -> Path:
    """The file of a finding. `key` names everything that the finding depends on. `folder`: None
    takes the one of `kind` in the user's cache folder."""
    text = json.dumps(dict(key), sort_keys=True)
    place = folder or user_cache_path("asyncinfer") / kind
    return place / f"{hashlib.sha256(text.encode()).hexdigest()[:32]}.json"


def read_kept(path: Path, key: Mapping[str, str]) -> dict[str, Any] | None:
    """What `keep` wrote; None where there is nothing, or a file that it did not write."""
    try:
        kept = json.loads(read_regular(path, _MOST_BYTES)[0])
        if not isinstance(kept, dict) or kept["key"] != key:
            return None
    except (OSError, ValueError, KeyError, RecursionError):
        return None
    return kept


def read_regular(path: Path, most: int) -> tuple[bytes, os.stat_result]:
    """The content and status of a regular file of at most `most` bytes. Raises `OSError` for
    anything else: reading a pipe or a device could block for ever."""
    with open_regular(path) as file:
        state = os.fstat(file.fileno())
        if state.st_size > most:
            raise OSError(f"{path} has more than {most} bytes")
        return file.read(most), state


def open_regular(path: Path) -> FileIO:
    """Open a regular file, following no link. Raises `OSError` for anything else, as
    `read_regular` does."""
    file = FileIO(os.open(path, os.O_RDONLY | _WITHOUT_WAITING))
    if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
        file.close()
        raise OSError(f"{path} is no regular file")
    return file


def keep(path: Path, key: Mapping[str, str], **found: object) -> None:
    """Write what was found. A folder that cannot be written to keeps nothing."""
    with suppress(OSError):
        path.parent.mkdir(parents=True, exist_ok=True)
        write_whole(path, json.dumps({"key": dict(key), **found}, indent=1).encode())


def write_whole(path: Path, content: bytes) -> None:
    """Write a file atomically, readable by its owner alone. Removes the oldest files of this
    package if the folder then has too many. Raises `OSError`."""
    handle, name = tempfile.mkstemp(dir=path.parent, suffix=".new")
    try:
        with os.fdopen(handle, "wb") as file:
            file.write(content)
        os.replace(name, path)
    except OSError:
        os.unlink(name)
        raise
    _prune(path.parent)


def _prune(folder: Path) -> None:
    """Remove the oldest files of this package, half-written ones included."""
    with os.scandir(folder) as entries:
        found = [each for each in entries if _OURS.fullmatch(each.name)]
    files = []
    for entry in found:
        # Another process may remove one first.
        with suppress(OSError):
            state = entry.stat(follow_symlinks=False)
            files.append((state.st_mtime_ns, entry.path, state.st_size))
    size = 0
    for number, (_, name, more) in enumerate(sorted(files, reverse=True), 1):
        size += more
        if number > MOST_FILES or size > MOST_FOLDER_BYTES:
            with suppress(OSError):
                os.unlink(name)


def forget(path: Path) -> None:
    """Remove what was kept."""
    with suppress(OSError):
        path.unlink(missing_ok=True)
