"""`copy_key`: everything that the bytes of a model's weights in a CPU's layout depend on."""

from __future__ import annotations

import functools
import hashlib
import json
import os
from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Final

import torch

from asyncinfer.machine import cpu_model, cpuinfo, version
from asyncinfer.weights.file_reader import FileReader
from asyncinfer.weights.packed import Packed
from asyncinfer.weights.tensor_files import TensorFiles

__all__ = ["copy_key"]

#: The rooms whose code reads, orders and lays out weights.
_ROOMS: Final = ("kernels", "models", "quantization", "weights")
#: Variables by which users choose a processor's instructions.
_VARIABLES: Final = ("ATEN_CPU_CAPABILITY", "DNNL_MAX_CPU_ISA", "ONEDNN_MAX_CPU_ISA")
#: Pieces of a file that are compared, and bytes of each. Times of change alone would take a file
#: that was written over with an older one's time for the same.
_PIECES: Final = 64
_PIECE_BYTES: Final = 4096
_MOST_CONFIG_BYTES: Final = 1 << 20


def copy_key(
    checkpoint: TensorFiles[FileReader],
    table: Mapping[str, Packed],
    dtype: torch.dtype,
    storage: str,
    keep_packed: bool,
) -> dict[str, str]:
    """Names the weights of an open checkpoint as a model of `table` holds them here. The files are
    told apart by name, size, time of change and 64 pieces, so that they are not read whole."""
    return {
        "files": _hashed(_files(checkpoint)),
        "table": _hashed([json.dumps([(name, repr(each)) for name, each in table.items()])]),
        "dtype": str(dtype),
        "storage": f"{storage}, packed: {keep_packed}",
        "threads": str(torch.get_num_threads()),
        "processor": _hashed([cpu_model(), cpuinfo().get("flags", cpuinfo().get("Features", ""))]),
        "variables": ", ".join(f"{name}={os.environ.get(name, '')}" for name in _VARIABLES),
        "versions": ", ".join(f"{name} {version(name)}" for name in ("asyncinfer", "llvmlite")),
        "torch": torch.__version__,
        "code": _code(),
    }


def _files(checkpoint: TensorFiles[FileReader]) -> Iterator[str | bytes]:
    """What tells the files apart: those of the weights, and configs, which say what they mean."""
    for name, file in sorted(checkpoint.reader.files.items()):
        state = os.fstat(file.fileno())
        yield f"{name}, {state.st_size}, {state.st_mtime_ns}"
        content = bytearray(min(_PIECE_BYTES, state.st_size))
        for piece in range(_PIECES):
            start = (state.st_size - len(content)) * piece // (_PIECES - 1)
            checkpoint.reader.fill(name, "its pieces", start, memoryview(content))
            yield bytes(content)
    if checkpoint.folder.is_dir():
        for path in sorted(checkpoint.folder.glob("*config*.json")):
            with suppress(OSError), path.open("rb") as config:
                yield path.name
                yield config.read(_MOST_CONFIG_BYTES)


@functools.cache
def _code() -> str:
    """A hash of the code, which may change within a version of the package."""
    package = Path(__file__).parents[1]
    paths = (path for room in _ROOMS for path in sorted((package / room).rglob("*.py")))
    return _hashed(path.read_bytes() for path in paths)


def _hashed(parts: Iterable[str | bytes]) -> str:
    digest = hashlib.sha256()
    for part in parts:
        content = part.encode() if isinstance(part, str) else part
        digest.update(len(content).to_bytes(8, "little") + content)
    return digest.hexdigest()
