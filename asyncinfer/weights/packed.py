"""The table from a checkpoint's tensors to the model's, several packed into one."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TypeAlias

import torch

from asyncinfer.errors import ModelLoadError
from asyncinfer.quantization import PackedWeight
from asyncinfer.quantization.schemes import Scheme
from asyncinfer.weights.file_reader import FileReader
from asyncinfer.weights.quantised import QuantisedMatrix, find_quantised
from asyncinfer.weights.tensor_files import TensorFiles

__all__ = ["Packed", "Piece", "WeightSource", "alike", "check_weights"]

#: The dtypes that a weight may be stored in, by safetensors' names.
_STORED = ("BF16", "F16", "F32")


@dataclass(frozen=True, slots=True)
class Piece:
    """A tensor of the checkpoint."""

    name: str
    shape: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Packed:
    """A tensor of the model: its pieces concatenated along dimension 0."""

    pieces: tuple[Piece, ...]
    #: By torch's name; None: the model's dtype.
    dtype: str | None = None

    def held_in(self, dtype: torch.dtype) -> torch.dtype:
        """The tensor's dtype in a model of `dtype`."""
        own = getattr(torch, self.dtype) if self.dtype else dtype
        assert isinstance(own, torch.dtype)
        return own

    @property
    def shape(self) -> tuple[int, ...]:
        if len(self.pieces) == 1:
            return self.pieces[0].shape
        return (sum(piece.shape[0] for piece in self.pieces), *self.pieces[0].shape[1:])


#: Returns the model's tensor of a name in the table, on the device; each is requested once. A
#: matrix may stay quantised.
WeightSource: TypeAlias = "Callable[[str], torch.Tensor | PackedWeight]"


def check_weights(
    checkpoint: TensorFiles[FileReader],
    table: Mapping[str, Packed],
    ignored: Callable[[str], bool] = lambda name: False,
    scheme: Scheme | None = None,
) -> dict[str, QuantisedMatrix]:
    """Raise `ModelLoadError` unless the checkpoint has exactly the tensors of `table`, in their
    shapes, or what `scheme` holds them in. Returns the matrices that are
    quantised, by name.

    Reads headers only. `ignored` says which names may be left over.
    """
    pieces = {piece.name: piece for packed in table.values() for piece in packed.pieces}
    quantised: dict[str, QuantisedMatrix] = {}
    for piece in pieces.values():
        found = _quantised(checkpoint, piece, scheme)
        if found is None:
            _check_plain(checkpoint, piece)
        else:
            quantised[piece.name] = found
    held = {name for matrix in quantised.values() for name in matrix.names}
    for name, stored in checkpoint.tensors.items():
        plain = name in pieces and name not in quantised
        if plain or name in held or ignored(name) or (scheme is not None and scheme.ignores(name)):
            continue
        raise ModelLoadError(
            "left over: the model has no place for it", file=stored.file, tensor=name
        )
    return quantised


def _quantised(
    checkpoint: TensorFiles[FileReader], piece: Piece, scheme: Scheme | None
) -> QuantisedMatrix | None:
    """The tensors that hold the piece if it is quantised; None if it is plain, or should be."""
    if scheme is None:
        return None
    stored = checkpoint.tensors.get(piece.name)
    if stored is not None and stored.dtype in _STORED and stored.shape == piece.shape:
        return None
    return find_quantised(checkpoint, piece.name, piece.shape, scheme)


def _check_plain(checkpoint: TensorFiles[FileReader], piece: Piece) -> None:
    stored = checkpoint.tensors.get(piece.name)
    if stored is None:
        folder = str(checkpoint.folder)
        raise ModelLoadError("missing in the checkpoint", file=folder, tensor=piece.name)
    if not alike(stored.shape, piece.shape):
        raise ModelLoadError(
            f"shape {list(stored.shape)}, config.json makes it {list(piece.shape)}",
            file=stored.file,
            tensor=piece.name,
        )
    if stored.dtype not in _STORED:
        raise ModelLoadError(
            f"dtype {stored.dtype}: must be one of {', '.join(_STORED)}",
            file=stored.file,
            tensor=piece.name,
        )


def alike(stored: tuple[int, ...], wanted: tuple[int, ...]) -> bool:
    """Whether a tensor's shape is that which is wanted. A vector may be stored as a matrix of one
    row, and such a matrix as a vector."""
    return _as_matrix(stored) == _as_matrix(wanted)


def _as_matrix(shape: tuple[int, ...]) -> tuple[int, ...]:
    return (1, *shape) if len(shape) == 1 else shape
