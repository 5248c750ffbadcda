"""`GgufCheckpoint`: the tensors of a GGUF file, single or split."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Sequence
from functools import cache
from itertools import pairwise
from pathlib import Path
from typing import Final

import numpy as np
from gguf import GGML_QUANT_SIZES, GGMLQuantizationType, dequantize

from asyncinfer.errors import ModelLoadError, short_repr
from asyncinfer.kernels.block_types import BLOCK_TYPES
from asyncinfer.weights.gguf.file_names import split_names
from asyncinfer.weights.gguf.header import GgufHeader, TensorInfo, read_header
from asyncinfer.weights.gguf.reader import FileSpan, GgufReader
from asyncinfer.weights.tensor_files import StoredTensor, TensorFiles

__all__ = ["GgufCheckpoint"]

#: A tensor of all experts. Each expert's part has a name of its own.
_EXPERTS: Final = re.compile(r"(blk\.\d+\.ffn_\w+_exps)\.(weight|bias)")
_MOST_EXPERTS: Final = 1 << 14
#: Most tensors, with each expert's, several times those of any model: parts of a file may overlap.
_MOST_TENSORS: Final = 1 << 18
#: A norm's weight without the usual ending, in files of Falcon-H1.
_UNENDED: Final = re.compile(r"blk\.\d+\.ffn_norm")
#: Tensors that a file stores with more dimensions than the model has.
_VECTORS: Final = re.compile(r"blk\.\d+\.(ssm_[ad]|ssm_norm\.weight)")
#: Depthwise convolutions, whose dimension of size one a file lacks or has elsewhere.
_CONVOLUTIONS: Final = re.compile(r"blk\.\d+\.(ssm_conv1d(_[qkv])?|shortconv\.conv)\.weight")
#: Lists in the metadata that are weights, one number for each layer.
_BY_LAYER: Final = ("xielu.alpha_p", "xielu.alpha_n", "xielu.beta", "xielu.eps")
_MOST_LAYERS: Final = 1 << 12
#: safetensors' names of the types that are read without conversion.
_PLAIN: Final = {
    GGMLQuantizationType.F32: "F32",
    GGMLQuantizationType.F16: "F16",
    GGMLQuantizationType.BF16: "BF16",
}


class GgufCheckpoint(TensorFiles[GgufReader]):
    """The tensors of one file, or of the files that a model was split into.

    Quantised tensors are listed as float32, and can be read so; those of `BLOCK_TYPES` can also be
    read unconverted. A tensor of all experts, such as `blk.0.ffn_up_exps.weight`, is listed by
    expert: `blk.0.ffn_up_exps.3.weight`. Weights in lists of the metadata, such as `xielu.beta`,
    are listed by layer: `blk.0.xielu.beta`. Raises `ModelLoadError`, naming file and tensor.
    """

    def __init__(self, path: str | Path) -> None:
        super().__init__(Path(path), GgufReader())
        headers = [read_header(part) for part in _files_of(self.folder)]
        _check_split(headers)
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
        ends: list[tuple[int, int, str]] = []
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
            # Checked before a tensor of all experts is split, since the file states their number.
            end = start + FileSpan(kind, start, math.prod(info.shape)).size
            if end > header.size:
                raise ModelLoadError(
                    f"ends at byte {end}, and the file has {header.size}", file=file, tensor=name
                )
            ends.append((start, end, name))
            if _EXPERTS.fullmatch(name) and info.shape[0] > _MOST_EXPERTS:
                raise ModelLoadError(
                    f"{info.shape[0]} experts, more than {_MOST_EXPERTS}", file=file, tensor=name
                )
            for part, shape in _parts(name, info.shape):
                if len(self.tensors) == _MOST_TENSORS:
                    raise ModelLoadError(
                        f"more than {_MOST_TENSORS} tensors, each expert's counted",
                        file=file,
                        tensor=name,
                    )
                if part in self.tensors:
                    raise ModelLoadError("occurs twice", file=file, tensor=part)
                span = FileSpan(kind, start, math.prod(shape))
                start += span.size
                self.tensors[part] = StoredTensor(file, shape, _PLAIN.get(kind, "F32"))
                self.reader.place(file, part, span)
        ends.sort()
        for (_, end, before), (start, _, name) in pairwise(ends):
            if start < end:
                raise ModelLoadError(
                    f"begins at byte {start}, within {before}", file=file, tensor=name
                )
        for key in _BY_LAYER:
            if key in header.lists:
                self._add_list(file, key, header.lists[key])

    def _add_list(self, file: str, key: str, info: TensorInfo) -> None:
        (count,) = info.shape
        if count > _MOST_LAYERS:
            raise ModelLoadError(f"{key} has {count} numbers, more than {_MOST_LAYERS}", file=file)
        for layer in range(count):
            name = f"blk.{layer}.{key}"
            if name in self.tensors:
                raise ModelLoadError("occurs twice", file=file, tensor=name)
            self.tensors[name] = StoredTensor(file, (1,), "F32")
            kind = GGMLQuantizationType.F32
            self.reader.place(file, name, FileSpan(kind, info.offset + 4 * layer, 1))

    def block_type(self, name: str) -> str | None:
        stored = self.tensors[name]
        kind = self.reader.kind(stored.file, name).name.lower()
        return kind if kind in BLOCK_TYPES and len(stored.shape) == 2 else None


def _files_of(path: Path) -> list[Path]:
    """The files of the model that `path` is the first of; `path` alone if it was not split."""
    parts = [path.with_name(name) for name in split_names(path.name)]
    for part in parts:
        try:
            whole, there = part.is_file(), part.exists()
        except OSError as error:
            raise ModelLoadError(f"cannot be opened: {error}", file=str(part)) from error
        if not whole:
            why = "is not a regular file" if there else "no such file"
            among = f"; {path.name} is one of {len(parts)}" if len(parts) > 1 else ""
            raise ModelLoadError(why + among, file=str(part))
    return parts


def _check_split(headers: Sequence[GgufHeader]) -> None:
    """Refuse files whose headers say that they belong to other parts, or that parts are missing."""
    count = len(headers)
    for number, header in enumerate(headers):
        tensors = sum(len(each.tensors) for each in headers) if count > 1 else None
        right = {"split.no": number, "split.count": count, "split.tensors.count": tensors}
        for key, value in right.items():
            said = header.metadata.get(key, value)
            # Programs that merge files leave a count of zero.
            merged = count == 1 and key == "split.count" and type(said) is int and said == 0
            if value is not None and (type(said) is not int or said != value) and not merged:
                raise ModelLoadError(
                    f"{key}={short_repr(said)}: must be {value} of file {number + 1} of {count}; "
                    "is a file called otherwise than the others, or from another model?",
                    file=str(header.path),
                )


def _kind(number: int, file: str, tensor: str) -> GGMLQuantizationType:
    try:
        kind = GGMLQuantizationType(number)
    except ValueError:
        raise ModelLoadError(f"type {number} is not known", file=file, tensor=tensor) from None
    if kind not in _PLAIN and not _converts(kind):
        what = f"type {kind.name} cannot be read as floats"
        raise ModelLoadError(what, file=file, tensor=tensor)
    return kind


@cache
def _converts(kind: GGMLQuantizationType) -> bool:
    """Whether the `gguf` package can convert the numbers of a type."""
    try:
        dequantize(np.zeros((1, GGML_QUANT_SIZES[kind][1]), np.uint8), kind)
    except NotImplementedError:
        return False
    return True


def _parts(name: str, shape: tuple[int, ...]) -> Iterator[tuple[str, tuple[int, ...]]]:
    match = _EXPERTS.fullmatch(name)
    if match is None:
        if _UNENDED.fullmatch(name):
            name += ".weight"
        elif _VECTORS.fullmatch(name):
            shape = (math.prod(shape),)
        elif _CONVOLUTIONS.fullmatch(name):
            shape = (math.prod(shape[:-1]), 1, shape[-1])
        yield name, shape
        return
    for expert in range(shape[0]):
        yield f"{match[1]}.{expert}.{match[2]}", shape[1:]
