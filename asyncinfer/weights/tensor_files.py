"""`TensorFiles`: the tensors of a checkpoint, whatever the format of its files."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Generic, Self, TypeVar

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

    def block_type(self, name: str) -> str | None:
        """The type of `BLOCK_TYPES` in which a matrix is stored, whose bytes `reader.read_raw`
        reads; None: the matrix has no such blocks."""
        return None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.reader.close()
