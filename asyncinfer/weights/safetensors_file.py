"""`SafetensorsReader`: safetensors files, their headers checked before anything else is read."""

from __future__ import annotations

import json
import math
import os
import stat
from collections.abc import Mapping
from dataclasses import dataclass
from io import FileIO
from pathlib import Path
from typing import Any, Final

from asyncinfer.errors import ModelLoadError
from asyncinfer.files import KeyTwice, unique_keys
from asyncinfer.weights.file_reader import FileReader

__all__ = ["SafetensorsReader", "TensorSpan"]

#: Room for some hundred thousand tensors. A larger header would take minutes and gigabytes to read.
MOST_HEADER_BYTES: Final = 16 << 20
#: More than any tensor has: the product of a hundred million lengths would take for ever.
_MOST_DIMENSIONS: Final = 64
#: Bits of a number, by the format's names of dtypes.
_BITS: Final = {
    **dict.fromkeys(("F4",), 4),
    **dict.fromkeys(("F6_E2M3", "F6_E3M2"), 6),
    **dict.fromkeys(("BOOL", "U8", "I8", "F8_E5M2", "F8_E4M3", "F8_E8M0"), 8),
    **dict.fromkeys(("F8_E4M3FNUZ", "F8_E5M2FNUZ"), 8),
    **dict.fromkeys(("U16", "I16", "F16", "BF16"), 16),
    **dict.fromkeys(("U32", "I32", "F32"), 32),
    **dict.fromkeys(("U64", "I64", "F64", "C64"), 64),
}


@dataclass(frozen=True, slots=True)
class TensorSpan:
    """One tensor of a file, as the header describes it."""

    #: The format's name, such as "BF16".
    dtype: str
    shape: tuple[int, ...]
    #: Bytes from the beginning of the file, and bytes of the tensor.
    start: int
    size: int


class SafetensorsReader(FileReader):
    """The safetensors files of a checkpoint."""

    def __init__(self) -> None:
        super().__init__()
        self._spans: dict[str, Mapping[str, TensorSpan]] = {}

    def open(self, name: str, path: Path) -> Mapping[str, TensorSpan]:
        """Add the file `name`; returns its tensors. Raises `ModelLoadError` for an invalid header,
        naming the tensor at fault if there is one."""
        try:
            spans = self._spans[name] = _read_header(self.add(name, path))
        except _Fault as fault:
            message = f"cannot be read as safetensors: {fault.why}"
            raise ModelLoadError(message, file=name, tensor=fault.tensor) from None
        except (OSError, ValueError, RecursionError) as error:
            raise ModelLoadError(f"cannot be read as safetensors: {error}", file=name) from error
        return spans

    def spans(self, file: str) -> Mapping[str, TensorSpan]:
        """The tensors of an opened file."""
        return self._spans[file]

    def read(self, file: str, tensor: str, offset: int, target: memoryview) -> None:
        span = self._spans[file][tensor]
        assert offset + len(target) <= span.size
        self.fill(file, tensor, span.start + offset, target)


class _Fault(Exception):
    def __init__(self, why: str, tensor: str | None = None) -> None:
        self.why = why
        self.tensor = tensor


def _read_header(file: FileIO) -> dict[str, TensorSpan]:
    """The tensors of a file by name: each has as many bytes as its dtype and shape make, and
    together they fill the file behind the header without gap or overlap."""
    status = os.fstat(file.fileno())
    if not stat.S_ISREG(status.st_mode):
        raise _Fault("is not a regular file")
    prefix = file.read(8)
    length = int.from_bytes(prefix, "little")
    if length > MOST_HEADER_BYTES:
        raise _Fault(f"a header of {length} bytes, more than {MOST_HEADER_BYTES}")
    first = len(prefix) + length
    if len(prefix) < 8 or first > status.st_size:
        raise _Fault(f"the header ends at byte {8 + length}, the file at {status.st_size}")
    try:
        header = json.loads(file.read(length), object_pairs_hook=unique_keys)
    except KeyTwice as twice:
        raise _Fault("occurs twice", twice.key) from None
    if not isinstance(header, dict):
        raise _Fault("the header is not a JSON object")
    metadata = header.pop("__metadata__", {})
    if not isinstance(metadata, dict) or not all(isinstance(v, str) for v in metadata.values()):
        raise _Fault("__metadata__ must map names to strings")
    spans = {name: _span(name, entry, first) for name, entry in header.items()}
    end = first
    for name, span in sorted(spans.items(), key=lambda item: (item[1].start, item[1].size)):
        if span.start != end:
            raise _Fault(f"begins at byte {span.start}, the tensor before it ends at {end}", name)
        end += span.size
        if end > status.st_size:
            raise _Fault(f"ends at byte {end}, the file at {status.st_size}", name)
    if end != status.st_size:
        raise _Fault(f"the last tensor ends at byte {end}, the file at {status.st_size}")
    return spans


def _span(name: str, entry: Any, first: int) -> TensorSpan:
    match entry:
        case {"dtype": str(dtype), "shape": list(shape), "data_offsets": [begin, end]}:
            pass
        case _:
            raise _Fault("must have a dtype, a shape and two data_offsets", name)
    if dtype not in _BITS:
        raise _Fault(f"dtype {dtype[:40]} is not known", name)
    if len(shape) > _MOST_DIMENSIONS:
        raise _Fault(f"{len(shape)} dimensions, more than {_MOST_DIMENSIONS}", name)
    if not all(type(number) is int and number >= 0 for number in (*shape, begin, end)):
        raise _Fault("shape and data_offsets must be integers from 0 on", name)
    if math.prod(shape) * _BITS[dtype] != 8 * (end - begin):
        raise _Fault("has other bytes than its dtype and shape make", name)
    return TensorSpan(dtype, tuple(shape), first + begin, end - begin)
