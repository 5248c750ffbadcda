"""The table from a checkpoint's tensors to the model's, several packed into one."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch

from asyncinfer.errors import ModelLoadError
from asyncinfer.weights.file_reader import FileReader
from asyncinfer.weights.tensor_files import TensorFiles

__all__ = ["STORED", "Packed", "Piece", "WeightSource", "check_weights"]

#: The dtypes a weight may be stored in, by safetensors' names.
STORED = {"BF16": torch.bfloat16, "F16": torch.float16, "F32": torch.float32}


@dataclass(frozen=True, slots=True)
class Piece:
    """A tensor of the checkpoint."""

    name: str
    shape: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Packed:
    """A tensor of the model: its pieces concatenated along dimension 0."""

    pieces: tuple[Piece, ...]
    #: None: the model's own.
    dtype: torch.dtype | None = None

    @property
    def shape(self) -> tuple[int, ...]:
        if len(self.pieces) == 1:
            return self.pieces[0].shape
        return (sum(piece.shape[0] for piece in self.pieces), *self.pieces[0].shape[1:])


#: Gives the model's tensor of a name in the table, on the device; each is asked for once.
WeightSource = Callable[[str], torch.Tensor]


def check_weights(
    checkpoint: TensorFiles[FileReader],
    table: Mapping[str, Packed],
    ignored: Callable[[str], bool] = lambda name: False,
) -> None:
    """Raise `ModelLoadError` unless the checkpoint has exactly the tensors of `table`, in their
    shapes.

    Reads headers only. `ignored` says which names may be left over.
    """
    pieces = {piece.name: piece for packed in table.values() for piece in packed.pieces}
    for piece in pieces.values():
        stored = checkpoint.tensors.get(piece.name)
        if stored is None:
            folder = str(checkpoint.folder)
            raise ModelLoadError("missing in the checkpoint", file=folder, tensor=piece.name)
        if stored.shape != piece.shape:
            raise ModelLoadError(
                f"shape {list(stored.shape)}, config.json makes it {list(piece.shape)}",
                file=stored.file,
                tensor=piece.name,
            )
        if stored.dtype not in STORED:
            raise ModelLoadError(
                f"dtype {stored.dtype}: must be one of {', '.join(STORED)}",
                file=stored.file,
                tensor=piece.name,
            )
    for name, stored in checkpoint.tensors.items():
        if name not in pieces and not ignored(name):
            raise ModelLoadError(
                "left over: the model has no place for it", file=stored.file, tensor=name
            )
