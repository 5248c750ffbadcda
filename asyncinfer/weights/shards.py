"""`ShardReader`: where the tensors of safetensors files lie, and their bytes."""

from __future__ import annotations

import json
import os
import stat
import struct
from io import FileIO
from operator import index
from pathlib import Path

from asyncinfer.errors import ModelLoadError
from asyncinfer.weights.file_reader import FileReader
from asyncinfer.weights.json_file import KeyTwice, unique_keys

__all__ = ["ShardReader"]


class ShardReader(FileReader):
    """The safetensors files of a checkpoint."""

    def __init__(self) -> None:
        super().__init__()
        #: For each file, where its tensors begin, and their bytes.
        self._spans: dict[str, dict[str, tuple[int, int]]] = {}

    def open(self, name: str, path: Path) -> None:
        """Add the file `name`, whose header was found sound. `ModelLoadError` if it is no more."""
        try:
            self._spans[name] = _spans(self.add(name, path))
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
        self.fill(file, tensor, start + offset, target)


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
