"""The header of a GGUF file, version 2 or 3: metadata and where the tensors lie.

The file may lie, so every count is compared with the bytes that are left before anything is
allocated for it. The `gguf` package takes seconds for a large vocabulary, twenty times as long;
tests compare the results with it.
"""

from __future__ import annotations

import math
import os
import struct
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO, Final
from weakref import WeakValueDictionary

import numpy as np

from asyncinfer.errors import ModelLoadError

__all__ = ["GgufHeader", "TensorInfo", "is_gguf", "read_header"]

_MAGIC: Final = b"GGUF"
_VERSIONS: Final = (2, 3)
_ALIGNMENT: Final = "general.alignment"
#: Bytes of a header, several times those of the largest vocabulary: a file may be sparse, and far
#: larger than what is read of it may become.
_MOST_BYTES: Final = 1 << 26
#: The first bytes that are read of a file.
_PIECE: Final = 1 << 21
_MOST_PAIRS: Final = 1 << 16
_MOST_TENSORS: Final = 1 << 17
#: Bytes of a name, by the format's definition.
_MOST_NAME: Final = (1 << 16) - 1
_MOST_DIMS: Final = 4
_MOST_NESTING: Final = 3
#: The most nested arrays: each is an object of a hundred bytes, even if it is empty.
_MOST_NESTED: Final = 1 << 16
#: Numbers of the format's value types: the fixed-size ones as struct and numpy spell them.
_NUMBERS: Final = {
    0: "B",
    1: "b",
    2: "H",
    3: "h",
    4: "I",
    5: "i",
    6: "f",
    7: "?",
    10: "Q",
    11: "q",
    12: "d",
}
_STRING: Final = 8
_ARRAY: Final = 9
_TOO_LONG: Final = f"the header has more than {_MOST_BYTES} bytes"
_DTYPES: Final = {"B": "u1", "b": "i1", "H": "u2", "h": "i2", "I": "u4", "i": "i4", "?": "u1"}
_DTYPES.update({"f": "f4", "Q": "u8", "q": "i8", "d": "f8"})


@dataclass(frozen=True, slots=True)
class TensorInfo:
    """One tensor of a file."""

    #: Outermost dimension first, as torch has it; the file has the innermost first.
    shape: tuple[int, ...]
    #: The number of ggml's type.
    kind: int
    #: Bytes from the beginning of the file.
    offset: int


@dataclass(frozen=True, slots=True, weakref_slot=True)
class GgufHeader:
    """What a file says before its weights."""

    path: Path
    metadata: Mapping[str, Any]
    tensors: Mapping[str, TensorInfo]
    #: The metadata's float32 lists as tensors, by their keys.
    lists: Mapping[str, TensorInfo]
    #: Bytes of the whole file.
    size: int


#: Headers that are in use, by path and state of their files.
_held: Final[WeakValueDictionary[tuple[str | int, ...], GgufHeader]] = WeakValueDictionary()


def is_gguf(path: str | Path) -> bool:
    """Whether a path is named like a GGUF file."""
    return Path(path).suffix.lower() == ".gguf"


def read_header(path: Path) -> GgufHeader:
    """Read the header of the regular file `path`. `ModelLoadError`, naming the key or tensor.

    A header that is still in use is returned again if the file has not changed: a model is opened
    for its tokenizer, its config and its weights, one after the other.
    """
    try:
        with path.open("rb") as file:
            state = os.fstat(file.fileno())
            if not state.st_size:
                raise ModelLoadError("is empty", file=str(path))
            key = (str(path), state.st_dev, state.st_ino, state.st_size, state.st_mtime_ns)
            header = _held.get(key)
            if header is None:
                header = _held[key] = _Reader(path, file, state.st_size).read()
            return header
    except (OSError, ValueError) as error:
        raise ModelLoadError(f"cannot be read: {error}", file=str(path)) from error


class _Reader:
    """Reads one header from its beginning to its end. The file is not mapped, as `FileReader`
    says why."""

    def __init__(self, path: Path, file: BinaryIO, size: int) -> None:
        self._path = path
        self._file = file
        #: What has been read of the file.
        self._content = b""
        #: Bytes of the file, and those that may be the header's.
        self._size = size
        self._end = min(self._size, _MOST_BYTES)
        self._at = 0
        self._nested = 0
        #: What is being read, for messages.
        self._what = "the header"

    def read(self) -> GgufHeader:
        if self._take(4) != _MAGIC:
            raise self._refuse("does not begin as a GGUF file does")
        (version,) = struct.unpack("<I", self._take(4))
        if version not in _VERSIONS:
            swapped = int.from_bytes(version.to_bytes(4, "little"), "big") in _VERSIONS
            more = ", written by a big-endian machine" if swapped else ""
            raise self._refuse(f"version {version}{more}: must be 2 or 3, little-endian")
        tensors, pairs = struct.unpack("<QQ", self._take(16))
        # The fewest bytes that a tensor and a pair take.
        self._bound("tensors", tensors, 24, _MOST_TENSORS)
        self._bound("metadata keys", pairs, 13, _MOST_PAIRS)
        metadata: dict[str, Any] = {}
        lists: dict[str, TensorInfo] = {}
        for index in range(pairs):
            self._what = f"metadata key {index}"
            key = self._string(_MOST_NAME)
            if key in metadata:
                raise self._refuse("occurs twice", key)
            self._what = f"metadata {key}"
            value = metadata[key] = self._value(self._number("I"))
            if isinstance(value, np.ndarray) and value.dtype == np.float32 and len(value):
                lists[key] = TensorInfo(value.shape, 0, self._at - value.nbytes)
        return GgufHeader(self._path, metadata, self._tensors(tensors, metadata), lists, self._size)

    def _tensors(self, count: int, metadata: Mapping[str, Any]) -> dict[str, TensorInfo]:
        found: dict[str, TensorInfo] = {}
        for index in range(count):
            self._what = f"tensor {index}"
            name = self._string(_MOST_NAME)
            if name in found:
                raise ModelLoadError("occurs twice", file=str(self._path), tensor=name)
            self._what = f"tensor {name}"
            dims = self._number("I")
            if not 1 <= dims <= _MOST_DIMS:
                raise self._refuse(f"{dims} dimensions: must be 1 to {_MOST_DIMS}")
            shape = struct.unpack(f"<{dims}Q", self._take(8 * dims))
            if 0 in shape or math.prod(shape) >= 1 << 48:
                raise self._refuse(f"shape {list(shape)}: must be of 1 to 2^48 numbers")
            kind, offset = struct.unpack("<IQ", self._take(12))
            found[name] = TensorInfo(shape[::-1], kind, offset)
        self._what = f"metadata {_ALIGNMENT}"
        alignment = metadata.get(_ALIGNMENT, 32)
        if not isinstance(alignment, int) or not 8 <= alignment <= 1 << 20 or alignment % 8:
            raise self._refuse(f"{alignment!r}: must be a multiple of 8")
        first = -(-self._at // alignment) * alignment
        return {
            name: TensorInfo(one.shape, one.kind, first + one.offset) for name, one in found.items()
        }

    def _value(self, kind: int, nesting: int = 0) -> Any:
        if kind in _NUMBERS:
            return self._number(_NUMBERS[kind])
        if kind == _STRING:
            return self._string()
        if kind != _ARRAY or nesting == _MOST_NESTING:
            raise self._refuse(f"value type {kind}: is not known")
        item, count = self._number("I"), self._number("Q")
        if item in _NUMBERS:
            dtype = np.dtype(f"<{_DTYPES[_NUMBERS[item]]}")
            self._bound("numbers", count, dtype.itemsize)
            values = np.frombuffer(self._take(count * dtype.itemsize), dtype)
            return values.astype(bool) if _NUMBERS[item] == "?" else values
        self._bound("values", count, 8)
        if item == _STRING:
            return self._strings(count)
        self._nested += count
        self._bound("arrays in arrays", self._nested, 0, _MOST_NESTED)
        return [self._value(item, nesting + 1) for _ in range(count)]

    def _strings(self, count: int) -> list[str]:
        # Inlined, since a vocabulary has a quarter of a million strings.
        content, at, size = self._content, self._at, len(self._content)
        length_at: Callable[..., tuple[int]] = struct.Struct("<Q").unpack_from
        found = []
        for _ in range(count):
            if at + 8 > size:
                content = self._read_to(at + 8)
                size = len(content)
            (length,) = length_at(content, at)
            at += 8
            if length > size - at:
                content = self._read_to(at + length)
                size = len(content)
            found.append(content[at : at + length].decode("utf-8", "replace"))
            at += length
        self._at = at
        return found

    def _string(self, most: int = _MOST_BYTES) -> str:
        length = self._number("Q")
        self._bound("bytes", length, 1, most)
        try:
            return self._take(length).decode("utf-8")
        except UnicodeDecodeError as error:
            raise self._refuse(f"is no UTF-8: {error}") from error

    def _number(self, code: str) -> Any:
        return struct.unpack(f"<{code}", self._take(struct.calcsize(f"<{code}")))[0]

    def _take(self, count: int) -> bytes:
        first, self._at = self._at, self._at + count
        return self._read_to(self._at)[first : self._at]

    def _read_to(self, end: int) -> bytes:
        """What has been read, now up to the byte `end` at least. Pieces grow, so that a short
        header costs little, and a long one few copies."""
        have = len(self._content)
        if have < end <= self._end:
            self._content += self._file.read(min(max(end, 4 * have, _PIECE), self._end) - have)
            if len(self._content) < end:
                # The file was cut short since it was opened.
                self._size = self._end = len(self._content)
        if end > self._end:
            raise self._short()
        return self._content

    def _bound(self, what: str, count: int, each: int, most: int = _MOST_BYTES) -> None:
        """Refuse `count` things of at least `each` bytes that the rest of the header cannot hold,
        or more than `most`."""
        if count > most:
            raise self._refuse(f"{count} {what}, more than {most}")
        if count * each > self._end - self._at:
            held = f"the file has {self._size} bytes"
            raise self._refuse(f"{count} {what}: {held if self._end == self._size else _TOO_LONG}")

    def _short(self) -> ModelLoadError:
        if self._end < self._size:
            return self._refuse(_TOO_LONG)
        return self._refuse(f"the file ends within it, after {self._size} bytes")

    def _refuse(self, why: str, what: str = "") -> ModelLoadError:
        return ModelLoadError(f"{what or self._what}: {why}", file=str(self._path))
