"""`TensorFiles`: the tensors of a checkpoint, whatever the format of its files."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Generic, Self, TypeVar

import torch

from asyncinfer.quantization import QuantisedWeight
from asyncinfer.weights.file_reader import FileReader

__all__ = ["StoredTensor", "TensorFiles"]

Reader = TypeVar("Reader", bound=FileReader, covariant=True)


@dataclass(frozen=True, slots=True)
class StoredTensor:
    """A tensor as a file's header describes it."""

    #: Name of the file.
    file: str
    shape: tuple[int, ...]
    #: safetensors' name of the dtype, such as "BF16".
    dtype: str


class TensorFiles(Generic[Reader]):
    """An open checkpoint, to be used in a `with` block. Opening it reads headers only."""

    def __init__(self, folder: Path, reader: Reader) -> None:
        #: The folder or file that messages name.
        self.folder = folder
        #: Reads the bytes of what `tensors` describes.
        self.reader = reader
        self.tensors: dict[str, StoredTensor] = {}

    def packed_bytes(self, name: str) -> int | None:
        """Bytes in the file of a tensor whose numbers `read_packed` reads; None if it does not."""
        return None

    def read_packed(self, name: str, dtype: torch.dtype) -> QuantisedWeight:
        """A tensor of two dimensions with its numbers as they are quantised, on the host, for a
        model of this dtype. May be called from any thread."""
        raise NotImplementedError(f"{name} is not packed")

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.reader.close()
