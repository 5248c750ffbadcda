"""`GgufReader`: tensors of GGUF files as numbers, dequantised as they are read."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import numpy as np
from gguf import GGML_QUANT_SIZES, GGMLQuantizationType, dequantize

from asyncinfer.errors import ModelLoadError
from asyncinfer.weights.file_reader import FileReader

__all__ = ["FileSpan", "GgufReader"]


@dataclass(frozen=True, slots=True)
class FileSpan:
    """A tensor's place in a file."""

    kind: GGMLQuantizationType
    #: Bytes from the beginning of the file.
    start: int
    #: Numbers in the tensor, a multiple of the type's block.
    numbers: int

    @property
    def plain(self) -> bool:
        """Whether its numbers are read without conversion; else they become float32."""
        return GGML_QUANT_SIZES[self.kind][0] == 1

    @property
    def size(self) -> int:
        """Bytes in the file."""
        block, size = GGML_QUANT_SIZES[self.kind]
        return self.numbers // block * size


class GgufReader(FileReader):
    """The GGUF files of a checkpoint. `read` may be called from any thread, until `close`."""

    def __init__(self) -> None:
        super().__init__()
        self._spans: dict[tuple[str, str], FileSpan] = {}

    def open(self, name: str, path: Path) -> None:
        """Add the file `name`. `ModelLoadError` if it cannot be opened."""
        try:
            self.add(name, path)
        except OSError as error:
            raise ModelLoadError(f"cannot be read: {error}", file=name) from error

    def place(self, file: str, tensor: str, span: FileSpan) -> None:
        """Note the place of a tensor in a file."""
        self._spans[file, tensor] = span

    def read_raw(self, file: str, tensor: str, offset: int, target: memoryview) -> None:
        self.fill(file, tensor, self._spans[file, tensor].start + offset, target)

    def kind(self, file: str, tensor: str) -> GGMLQuantizationType:
        """The type of a tensor."""
        return self._spans[file, tensor].kind

    def read(self, file: str, tensor: str, offset: int, target: memoryview) -> None:
        """Fill `target`, of bytes, with the tensor's numbers from `offset` bytes of them on: as
        they are in the file, or as float32 where they are quantised there."""
        span = self._spans[file, tensor]
        if span.plain:
            self.fill(file, tensor, span.start + offset, target)
            return
        block, size = GGML_QUANT_SIZES[span.kind]
        numbers = np.frombuffer(target, np.float32)
        first, end = offset // 4, offset // 4 + len(numbers)
        begin = first // block
        packed = np.empty((-(-end // block) - begin) * size, np.uint8)
        self.fill(file, tensor, span.start + begin * size, packed.data)
        # numpy releases the GIL in its loops, so other threads go on. An infinite scale, possible
        # in any float16, makes NaN.
        with np.errstate(invalid="ignore", over="ignore"):
            floats = dequantize(packed.reshape(1, -1), span.kind).reshape(-1)
        numbers[:] = floats[first - begin * block : end - begin * block]
