"""`GgufCheckpoint`: the tensors of a GGUF file, single or split."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Final

from gguf import GGML_QUANT_SIZES, GGMLQuantizationType

from asyncinfer.errors import ModelLoadError
from asyncinfer.weights.gguf.file_names import split_names
from asyncinfer.weights.gguf.header import GgufHeader, read_header
from asyncinfer.weights.gguf.reader import GgufReader, Span
from asyncinfer.weights.tensor_files import StoredTensor, TensorFiles

__all__ = ["GgufCheckpoint"]

#: A tensor of all experts. Each expert's part has a name of its own.
_EXPERTS: Final = re.compile(r"(blk\.\d+\.ffn_\w+_exps)\.(weight|bias)")
#: safetensors' names of the types that are read without conversion.
_PLAIN: Final = {
    GGMLQuantizationType.F32: "F32",
    GGMLQuantizationType.F16: "F16",
    GGMLQuantizationType.BF16: "BF16",
}


class GgufCheckpoint(TensorFiles[GgufReader]):
    """The tensors of one file, or of the files that a model was split into.

    Quantised tensors count as float32, since they are dequantised as they are read. A tensor of all
    experts, such as `blk.0.ffn_up_exps.weight`, is there by expert: `blk.0.ffn_up_exps.3.weight`.
    Raises `ModelLoadError`, naming file and tensor.
    """

    def __init__(self, path: str | Path) -> None:
        super().__init__(Path(path), GgufReader())
        headers = [read_header(part) for part in _files_of(self.folder)]
        self.metadata = headers[0].metadata
        try:
            for header in headers:
                self._add(header)
        except BaseException:
            self.reader.close()
            raise

    def _add(self, header: GgufHeader) -> None:
        file = header.path.name
        self.reader.open(file, header.path)
        for name, info in header.tensors.items():
            kind = _kind(info.kind, file, name)
            block = GGML_QUANT_SIZES[kind][0]
            if info.shape[-1] % block:
                raise ModelLoadError(
                    f"rows of {info.shape[-1]} numbers: {kind.name} has blocks of {block}",
                    file=file,
                    tensor=name,
                )
            start = info.offset
            for part, shape in _parts(name, info.shape):
                if part in self.tensors:
                    raise ModelLoadError("occurs twice", file=file, tensor=part)
                span = Span(kind, start, math.prod(shape))
                start += span.size
                self.tensors[part] = StoredTensor(file, shape, _PLAIN.get(kind, "F32"))
                self.reader.place(file, part, span)
            if start > header.size:
                raise ModelLoadError(
                    f"ends at byte {start}, and the file has {header.size}", file=file, tensor=name
                )


def _files_of(path: Path) -> list[Path]:
    """The files of the model that `path` is the first of; `path` alone if it was not split."""
    parts = [path.with_name(name) for name in split_names(path.name)]
    for part in parts:
        if not part.is_file():
            raise ModelLoadError(
                f"no such file; {path.name} is one of {len(parts)}", file=str(part)
            )
    return parts


def _kind(number: int, file: str, tensor: str) -> GGMLQuantizationType:
    try:
        return GGMLQuantizationType(number)
    except ValueError:
        raise ModelLoadError(f"type {number} is not known", file=file, tensor=tensor) from None


def _parts(name: str, shape: tuple[int, ...]) -> Iterator[tuple[str, tuple[int, ...]]]:
    match = _EXPERTS.fullmatch(name)
    if match is None:
        yield name, shape
        return
    for expert in range(shape[0]):
        yield f"{match[1]}.{expert}.{match[2]}", shape[1:]
