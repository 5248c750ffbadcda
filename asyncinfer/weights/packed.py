"""The table from a checkpoint's tensors to the model's, several packed into one."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch

from asyncinfer.errors import ModelLoadError
from asyncinfer.weights.checkpoint import Checkpoint
from asyncinfer.weights.progress import LoadProgress, OnProgress

__all__ = ["Packed", "Piece", "WeightLoader", "WeightSource", "check_weights"]

#: The dtypes a weight may be stored in, and their bytes.
_FLOATS = {"BF16": 2, "F16": 2, "F32": 4}


@dataclass(frozen=True, slots=True)
class Piece:
    """A tensor of the checkpoint."""

    name: str
    shape: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Packed:
    """A tensor of the model: the pieces one below the other, along dimension 0."""

    pieces: tuple[Piece, ...]
    #: None: the model's own.
    dtype: torch.dtype | None = None

    @property
    def shape(self) -> tuple[int, ...]:
        return (sum(piece.shape[0] for piece in self.pieces), *self.pieces[0].shape[1:])


#: Gives the model's tensor of a name in the table, on the device; each is asked for once.
WeightSource = Callable[[str], torch.Tensor]


def check_weights(
    checkpoint: Checkpoint,
    table: Mapping[str, Packed],
    ignored: Callable[[str], bool] = lambda name: False,
) -> None:
    """`ModelLoadError` unless the checkpoint holds just what `table` needs, as it needs it.

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
        if stored.dtype not in _FLOATS:
            raise ModelLoadError(
                f"dtype {stored.dtype}: must be one of {', '.join(_FLOATS)}",
                file=stored.file,
                tensor=piece.name,
            )
    for name, stored in checkpoint.tensors.items():
        if name not in pieces and not ignored(name):
            raise ModelLoadError(
                "left over: the model has no place for it", file=stored.file, tensor=name
            )


class WeightLoader:
    """A `WeightSource` that streams a checked checkpoint: piece by piece straight into its place on
    the device, with one piece at a time on the host."""

    def __init__(
        self,
        checkpoint: Checkpoint,
        table: Mapping[str, Packed],
        device: torch.device,
        dtype: torch.dtype,
        progress: OnProgress | None,
    ) -> None:
        self._checkpoint = checkpoint
        self._left = dict(table)
        self._device = device
        self._dtype = dtype
        self._progress = progress
        self._done = 0
        self._total = sum(
            self._bytes(piece) for packed in table.values() for piece in packed.pieces
        )
        self._report("")

    def __call__(self, name: str) -> torch.Tensor:
        packed = self._left.pop(name)
        target = torch.empty(packed.shape, dtype=packed.dtype or self._dtype, device=self._device)
        row = 0
        for piece in packed.pieces:
            target[row : row + piece.shape[0]].copy_(self._checkpoint.read(piece.name))
            row += piece.shape[0]
            self._done += self._bytes(piece)
            self._report(piece.name)
        return target

    def finish(self) -> None:
        """Every tensor of the table has been asked for."""
        assert not self._left, f"the model never asked for {sorted(self._left)}"

    def _report(self, tensor: str) -> None:
        if self._progress is not None:
            self._progress(LoadProgress(self._done, self._total, tensor))

    def _bytes(self, piece: Piece) -> int:
        size = _FLOATS[self._checkpoint.tensors[piece.name].dtype]
        for length in piece.shape:
            size *= length
        return size
