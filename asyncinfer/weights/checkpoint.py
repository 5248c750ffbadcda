"""`SafetensorsCheckpoint`: the safetensors of a folder, found through its index."""

from __future__ import annotations

import os
from collections.abc import Iterable
from pathlib import Path

from asyncinfer.errors import ModelLoadError
from asyncinfer.files import checkpoint_file, plain_name, read_json
from asyncinfer.weights.gguf import GgufCheckpoint, is_gguf
from asyncinfer.weights.safetensors_file import SafetensorsReader
from asyncinfer.weights.tensor_files import StoredTensor, TensorFiles

__all__ = ["INDEX", "SINGLE", "SafetensorsCheckpoint"]
__all__ += ["open_checkpoint", "read_index", "without_weights"]

SINGLE = "model.safetensors"
INDEX = "model.safetensors.index.json"
#: Room for some hundred thousand tensors, of a hundred bytes each, as the largest models have.
_MOST_INDEX_BYTES = 32 << 20
_PICKLED = (".bin", ".bin.index.json", ".pt", ".pth")


class SafetensorsCheckpoint(TensorFiles[SafetensorsReader]):
    """The safetensors of one folder.

    Raises `ModelLoadError`, naming file and tensor, for a missing or truncated shard, a tensor in
    two shards, an index that disagrees with its shards, and for pickled weights, which can run
    code.
    """

    def __init__(self, folder: str | Path, within: str = "") -> None:
        """`within` is the subfolder of a part of the model, which has one file of weights."""
        super().__init__(Path(folder), SafetensorsReader())
        self._within = within
        try:
            if checkpoint_file(self.folder, SINGLE, within) is not None:
                self._open(SINGLE)
            elif not within and checkpoint_file(self.folder, INDEX) is not None:
                self._open_indexed()
            else:
                raise self._nothing_to_load()
        except BaseException:
            self.reader.close()
            raise

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
        path = checkpoint_file(self.folder, file, self._within)
        if path is None:
            raise ModelLoadError(f"shard is missing in {self.folder}", file=file)
        for name, span in self.reader.open(file, path).items():
            if name in self.tensors:
                raise ModelLoadError(
                    f"occurs twice, also in {self.tensors[name].file}", file=file, tensor=name
                )
            self.tensors[name] = StoredTensor(file, span.shape, span.dtype)

    def _nothing_to_load(self) -> ModelLoadError:
        folder = self.folder / self._within
        if not folder.is_dir():
            return ModelLoadError("no such folder", file=str(folder))
        return without_weights(os.listdir(folder), str(folder))


def without_weights(names: Iterable[str], folder: str) -> ModelLoadError:
    """The error to raise about a folder, here or on the hub, which has these files and no weights
    that can be read."""
    names = sorted(names)
    pickled = [name for name in names if name.endswith(_PICKLED)]
    others = [name for name in names if name.endswith(".safetensors")]
    if pickled and not others:
        return ModelLoadError(
            "pickled weights are refused, they can run code when they are read; convert the"
            " checkpoint to safetensors",
            file=f"{folder}/{pickled[0]}",
        )
    more = f"; other files, such as {others[0]}, are not read" if others else ""
    return ModelLoadError(f"neither {SINGLE} nor {INDEX} in it{more}", file=folder)


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


def open_checkpoint(path: str | Path) -> SafetensorsCheckpoint | GgufCheckpoint:
    """Open a folder of safetensors, or a GGUF file, single or the first of several. Reads headers
    only. Raises `ModelLoadError`."""
    return GgufCheckpoint(path) if is_gguf(path) else SafetensorsCheckpoint(path)
