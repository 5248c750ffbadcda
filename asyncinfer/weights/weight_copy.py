"""Copies of a model's weights in the layout in which a CPU's layers hold them.

A copy is a safetensors file whose tensors are bytes: one for each part of a weight, padded to whole
cache lines. Its metadata say what the bytes are, and everything that they depend on. The header has
a digest of its own, since torch reads anywhere in memory by a layout that a disk has damaged.
"""

from __future__ import annotations

import ctypes
import hashlib
import json
import mmap
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict
from io import FileIO
from typing import Any, BinaryIO, Final, Protocol, TypeAlias

import torch

from asyncinfer.kernels.native import Layout
from asyncinfer.kernels.onednn_memory import layout_of, place_of
from asyncinfer.quantization import (
    BlockWeight,
    HeldWeight,
    LaidWeight,
    NativeWeight,
    ReorderedWeight,
    StackedWeight,
)
from asyncinfer.stats import LoadProgress
from asyncinfer.weights.memory import in_memory

__all__ = ["CopyFault", "MappedCopy", "WeightCopy", "WrittenCopy"]

#: Bytes of a cache line: vectors that cross one are read more slowly.
_LINE: Final = 64
#: Bytes that are looked at between two reports: of fewer, one thread alone looks at a byte of each
#: page. Bytes of a page, and those that Linux maps at a time where they are in memory.
_REPORTED: Final = 512 << 20
_PAGE: Final = 4096
_MAPPED: Final = 16 * _PAGE
#: Room for some hundred thousand weights.
_MOST_HEADER_BYTES: Final = 64 << 20

_Part: TypeAlias = "torch.Tensor | BlockWeight | LaidWeight | NativeWeight | ReorderedWeight"


class CopyFault(Exception):
    """A file is no copy of these weights."""


class WeightCopy(Protocol):
    """The weights of a model by name, as its layers hold them."""

    def held(self, name: str, made: Callable[[], HeldWeight]) -> HeldWeight:
        """The weight of this name: the copy's own, or what `made` returns, which is then kept."""


class WrittenCopy:
    """Collects the weights of a model, to be written once all are there."""

    def __init__(self, key: Mapping[str, str]) -> None:
        """`key` names everything that the weights' bytes depend on."""
        self.key: Final = dict(key)
        self._held: dict[str, HeldWeight] = {}

    def held(self, name: str, made: Callable[[], HeldWeight]) -> HeldWeight:
        found = self._held[name] = made()
        return found

    @property
    def nbytes(self) -> int:
        """Bytes of the weights in a file."""
        return sum(_padded(_nbytes(part)) for held in self._held.values() for part in _parts(held))

    def write(self, file: BinaryIO) -> None:
        """Write all weights. Raises `OSError`."""
        header: dict[str, Any] = {}
        about: dict[str, list[dict[str, Any]]] = {}
        end = 0
        for name, held in self._held.items():
            about[name] = []
            for number, part in enumerate(_parts(held)):
                size = _padded(_nbytes(part))
                header[f"{name}/{number}"] = {
                    "dtype": "U8",
                    "shape": [size],
                    "data_offsets": [end, end + size],
                }
                end += size
                about[name].append(_described(part))
        metadata = {"key": json.dumps(self.key), "weights": json.dumps(about)}
        header["__metadata__"] = metadata
        metadata["digest"] = _digest(header)
        text = json.dumps(header).encode()
        text += b" " * (_padded(8 + len(text)) - 8 - len(text))
        file.write(len(text).to_bytes(8, "little") + text)
        for held in self._held.values():
            for part in _parts(held):
                content = _content(part)
                file.write(content)
                file.write(bytes(_padded(len(content)) - len(content)))


class MappedCopy:
    """The weights of a file, mapped: processes share its pages, and the system may drop some of
    them and read them again."""

    def __init__(self, file: FileIO, key: Mapping[str, str]) -> None:
        """Raises `CopyFault` for a file that was not written for this key, `RuntimeError` where
        torch cannot make a weight of its bytes, and `OSError`."""
        length = int.from_bytes(file.read(8), "little")
        if length > _MOST_HEADER_BYTES:
            raise CopyFault(f"a header of {length} bytes")
        try:
            header = json.loads(file.read(length))
            digest = header["__metadata__"].pop("digest")
            if digest != _digest(header):
                raise CopyFault("its header was damaged")
            metadata = header.pop("__metadata__")
            found, weights = json.loads(metadata["key"]), json.loads(metadata["weights"])
            spans = {
                name: (8 + length + entry["data_offsets"][0], entry["shape"][0])
                for name, entry in header.items()
            }
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise CopyFault(f"its header cannot be read: {error!r}") from error
        if found != dict(key):
            raise CopyFault("it is of other weights")
        end = max((start + size for start, size in spans.values()), default=0)
        if end != os.fstat(file.fileno()).st_size:
            raise CopyFault(f"it does not end at byte {end}")
        # Private: what a program writes to it by mistake stays in its own memory.
        mapped = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY)
        self._memory = torch.frombuffer(mapped, dtype=torch.uint8)
        self._in_memory = in_memory(file.fileno())
        self._held = {
            name: _whole(
                [
                    _made(self._memory[spans[f"{name}/{number}"][0] :][: about["bytes"]], about)
                    for number, about in enumerate(parts)
                ]
            )
            for name, parts in weights.items()
        }

    def held(self, name: str, made: Callable[[], HeldWeight]) -> HeldWeight:
        return self._held[name]

    def read(self, progress: Callable[[LoadProgress], None] | None) -> None:
        """Have every page in memory, so that no step waits for the disk."""
        total, apart = len(self._memory), _MAPPED if self._in_memory else _PAGE
        for start in range(0, total, _REPORTED):
            some = self._memory[start : start + _REPORTED]
            # Any operator on these bytes will do; it holds no GIL.
            some[::apart].max()
            if progress is not None:
                progress(LoadProgress(start + len(some), total, ""))


def _made(memory: torch.Tensor, about: Mapping[str, Any]) -> _Part:
    """The part that `_described` was told about, in this memory."""
    shape, dtype = tuple(about["shape"]), getattr(torch, about["dtype"])
    match about["kind"]:
        case "reordered":
            layout = bytes.fromhex(about["layout"])
            return ReorderedWeight.at(memory, shape, dtype, layout, about["native"])
        case "native":
            return NativeWeight.at(memory, shape, dtype)
        case "laid":
            blocks = memory.view(shape)
            return LaidWeight(blocks, Layout(**about["layout"]), about["factor"], dtype)
        case "blocks":
            return BlockWeight(memory.view(shape), about["code"], dtype)
    return memory.view(dtype).view(shape)


def _whole(parts: Sequence[_Part]) -> HeldWeight:
    """The weight of these parts."""
    if len(parts) == 1:
        return parts[0]
    packed = tuple(part for part in parts if isinstance(part, BlockWeight | LaidWeight))
    return StackedWeight(packed, packed[0].dtype)


def _parts(held: HeldWeight) -> Iterator[_Part]:
    """The parts of a weight that lie in memory of their own."""
    if isinstance(held, StackedWeight):
        for part in held.parts:
            yield from _parts(part)
    else:
        kinds = torch.Tensor | BlockWeight | LaidWeight | NativeWeight | ReorderedWeight
        assert isinstance(held, kinds)
        yield held


def _described(part: _Part) -> dict[str, Any]:
    """All of a part but its bytes."""
    about: dict[str, Any] = {
        "dtype": str(part.dtype).removeprefix("torch."),
        "bytes": _nbytes(part),
        "shape": list(_shape(part)),
    }
    if isinstance(part, ReorderedWeight):
        layout, native = layout_of(part.tensor).hex(), part.native is not None
        return {**about, "kind": "reordered", "layout": layout, "native": native}
    if isinstance(part, NativeWeight):
        return {**about, "kind": "native"}
    if isinstance(part, LaidWeight):
        return {**about, "kind": "laid", "layout": asdict(part.layout), "factor": part.factor}
    if isinstance(part, BlockWeight):
        return {**about, "kind": "blocks", "code": part.code}
    return {**about, "kind": "floats"}


def _content(part: _Part) -> memoryview:
    """The bytes of a part."""
    if isinstance(part, ReorderedWeight):
        place = place_of(part.tensor)
        assert place is not None
        return memoryview((ctypes.c_char * place[1]).from_address(place[0])).cast("B")
    if isinstance(part, NativeWeight):
        return part.memory.numpy().data
    tensor = part.blocks if isinstance(part, BlockWeight | LaidWeight) else part
    return tensor.contiguous().flatten().view(torch.uint8).numpy().data


def _nbytes(part: _Part) -> int:
    if isinstance(part, ReorderedWeight):
        place = place_of(part.tensor)
        assert place is not None
        return place[1]
    return part.nbytes


def _digest(header: Mapping[str, Any]) -> str:
    """Of a header without its digest."""
    return hashlib.sha256(json.dumps(header).encode()).hexdigest()


def _padded(size: int) -> int:
    return -(-size // _LINE) * _LINE


def _shape(part: _Part) -> tuple[int, ...]:
    return part.blocks.shape if isinstance(part, BlockWeight | LaidWeight) else part.shape
