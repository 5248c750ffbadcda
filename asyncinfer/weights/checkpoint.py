"""A checkpoint's tensors: found through its index, described by its shards' headers, read one by
one."""

from __future__ import annotations

import contextlib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, Protocol, Self

import torch
from safetensors import SafetensorError, safe_open

from asyncinfer.errors import ModelLoadError
from asyncinfer.weights.blame import MOST_HEADER_BYTES, tensor_at_fault
from asyncinfer.weights.file_reader import FileReader
from asyncinfer.weights.folder import checkpoint_file, plain_name
from asyncinfer.weights.json_file import read_json
from asyncinfer.weights.shards import ShardReader

__all__ = ["INDEX", "SINGLE", "Checkpoint", "StoredTensor", "TensorFiles", "read_index"]

SINGLE = "model.safetensors"
INDEX = "model.safetensors.index.json"
#: The largest models have some hundred thousand tensors, of a hundred bytes in here.
_MOST_INDEX_BYTES = 32 << 20


@dataclass(frozen=True, slots=True)
class StoredTensor:
    """What a shard's header says of one tensor."""

    file: str
    shape: tuple[int, ...]
    #: safetensors' name of the dtype, such as "BF16".
    dtype: str


class TensorFiles(Protocol):
    """Where the tensors of a model are read from."""

    #: The folder or file that messages name.
    folder: Path

    @property
    def tensors(self) -> Mapping[str, StoredTensor]: ...

    @property
    def reader(self) -> FileReader:
        """Reads what `tensors` describes."""


class Checkpoint:
    """The safetensors of one folder. Opening it reads headers only; use it in a `with` block.

    `ModelLoadError`, naming file and tensor, for a missing or truncated shard, a tensor in two
    shards, an index that disagrees with its shards, and for pickled weights, which can run code.
    """

    def __init__(self, folder: str | Path) -> None:
        self.folder = Path(folder)
        self.tensors: dict[str, StoredTensor] = {}
        #: Reads what the headers describe.
        self.reader = ShardReader()
        self._shards: dict[str, Any] = {}
        self._stack = contextlib.ExitStack()
        self._stack.callback(self.reader.close)
        with contextlib.ExitStack() as undo:
            undo.callback(self._stack.close)
            if checkpoint_file(self.folder, SINGLE) is not None:
                self._open(SINGLE)
            elif checkpoint_file(self.folder, INDEX) is not None:
                self._open_indexed()
            else:
                raise self._nothing_to_load()
            undo.pop_all()

    def read(self, name: str) -> torch.Tensor:
        """The tensor on the host, a copy of its own in the dtype it is stored in."""
        file = self.tensors[name].file
        try:
            tensor: torch.Tensor = self._shards[file].get_tensor(name)
        except (SafetensorError, OSError) as error:
            raise ModelLoadError(str(error), file=file, tensor=name) from error
        return tensor

    def _open_indexed(self) -> None:
        weight_map = read_index(self.folder)
        for file in sorted(set(weight_map.values())):
            self._open(file)
        for name, file in weight_map.items():
            stored = self.tensors.get(name)
            if stored is None or stored.file != file:
                raise ModelLoadError(
                    "the index names it, the shard lacks it", file=file, tensor=name
                )
        for name, stored in self.tensors.items():
            if name not in weight_map:
                raise ModelLoadError("left over: not in the index", file=stored.file, tensor=name)

    def _open(self, file: str) -> None:
        path = checkpoint_file(self.folder, file)
        if path is None:
            raise ModelLoadError(f"shard is missing in {self.folder}", file=file)
        self._check_header(path, file)
        try:
            shard = self._stack.enter_context(safe_open(path, framework="pt", device="cpu"))
            names = list(shard.keys())
            slices = {name: shard.get_slice(name) for name in names}
        except (SafetensorError, OSError) as error:
            tensor = tensor_at_fault(path)
            raise ModelLoadError(f"cannot be read: {error}", file=file, tensor=tensor) from error
        for name, view in slices.items():
            if name in self.tensors:
                raise ModelLoadError(
                    f"occurs twice, also in {self.tensors[name].file}", file=file, tensor=name
                )
            self.tensors[name] = StoredTensor(file, tuple(view.get_shape()), view.get_dtype())
        self._shards[file] = shard
        self.reader.open(file, path)

    def _check_header(self, path: Path, file: str) -> None:
        """Refuse a header that would take minutes and gigabytes to read."""
        try:
            with open(path, "rb") as opened:
                length = int.from_bytes(opened.read(8), "little")
        except OSError as error:
            raise ModelLoadError(f"cannot be read: {error}", file=file) from error
        if length > MOST_HEADER_BYTES:
            why = f"a header of {length} bytes, more than {MOST_HEADER_BYTES}"
            raise ModelLoadError(f"cannot be read as safetensors: {why}", file=file)

    def _nothing_to_load(self) -> ModelLoadError:
        if not self.folder.is_dir():
            return ModelLoadError("no such folder", file=str(self.folder))
        pickled = sorted(
            entry.name
            for pattern in ("*.bin", "*.bin.index.json", "*.pt", "*.pth")
            for entry in self.folder.glob(pattern)
        )
        if pickled:
            return ModelLoadError(
                "pickled weights are refused, they can run code when they are read; convert the"
                " checkpoint to safetensors",
                file=str(self.folder / pickled[0]),
            )
        return ModelLoadError(f"neither {SINGLE} nor {INDEX} in it", file=str(self.folder))

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._shards.clear()
        self._stack.close()


def read_index(folder: Path) -> dict[str, str]:
    """Tensor names to the shards that the folder's index says they are in."""
    weight_map = read_json(folder / INDEX, _MOST_INDEX_BYTES).get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise ModelLoadError("holds no weight_map", file=INDEX)
    for name, file in weight_map.items():
        if not isinstance(file, str) or not file.endswith(".safetensors"):
            raise ModelLoadError(
                f"shard {file!r}: must be a .safetensors file", file=INDEX, tensor=name
            )
        if not plain_name(file):
            raise ModelLoadError(
                f"shard {file!r}: leads out of the folder", file=INDEX, tensor=name
            )
    return weight_map
