"""Machine code of earlier processes, kept in the user's cache folder.

LLVM takes 0.1 to 0.9 s of processor time to compile the code of one layout. Linking kept code takes
2 ms. Kept code is run as it is. So a file counts only if this user owns it, nobody else may write
to it, and its hash covers the code and everything that the code depends on. Files are written
atomically.
"""

from __future__ import annotations

import functools
import hashlib
import json
import os
import stat
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Final

from asyncinfer.kernels import block_types, codes
from asyncinfer.kernels.kept import kept_path, read_regular, write_whole

__all__ = ["kept_code", "source_hash"]

_KIND: Final = "native-kernels"
_HASH: Final = hashlib.sha256().digest_size
#: The most bytes of a file that is read. The largest kernel has 40 KB.
_MOST_BYTES: Final = 1 << 22
#: Bits of a file's mode that let others write to it.
_OTHERS_WRITE: Final = stat.S_IWGRP | stat.S_IWOTH


def kept_code(
    key: Mapping[str, str], make: Callable[[], bytes], folder: Path | None = None
) -> bytes:
    """The object file of `key`, which names everything that the code depends on: the kept file, or
    the result of `make`, which is then kept. `folder`: None takes the user's cache folder.

    A folder that cannot be read or written to keeps nothing.
    """
    if not hasattr(os, "geteuid"):
        # On other systems a file's mode does not say who may write to it.
        return make()
    path = kept_path(_KIND, key, folder).with_suffix(".o")
    code = _read(path, key)
    if code is None:
        code = make()
        with suppress(OSError):
            path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            write_whole(path, _hash(key, code) + code)
    return code


def _read(path: Path, key: Mapping[str, str]) -> bytes | None:
    try:
        content, state = read_regular(path, _MOST_BYTES)
    except OSError:
        return None
    if state.st_uid != os.geteuid() or state.st_mode & _OTHERS_WRITE:
        return None
    found, code = content[:_HASH], content[_HASH:]
    return code if code and found == _hash(key, code) else None


def _hash(key: Mapping[str, str], code: bytes) -> bytes:
    about = json.dumps(dict(key), sort_keys=True).encode()
    return hashlib.sha256(len(about).to_bytes(8, "little") + about + code).digest()


@functools.cache
def source_hash() -> str:
    """A hash of the source code that makes LLVM's assembly."""
    digest = hashlib.sha256()
    paths = sorted(Path(__file__).parent.glob("*.py"))
    for path in (*paths, *(Path(str(module.__file__)) for module in (block_types, codes))):
        digest.update(path.read_bytes())
    return digest.hexdigest()
