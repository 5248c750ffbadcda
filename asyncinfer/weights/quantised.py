"""Which tensors of a checkpoint hold its quantised matrices."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Final

import torch

from asyncinfer.errors import ModelLoadError
from asyncinfer.kernels.threads import share
from asyncinfer.quantization.schemes import BadPart, MatrixFormat, Part, Rows, Scheme
from asyncinfer.weights.file_reader import FileReader
from asyncinfer.weights.tensor_files import TensorFiles

__all__ = ["QuantisedMatrix", "blaming", "fill_rows", "find_quantised", "torch_dtype"]

#: The dtypes of tensors that hold a quantised matrix: safetensors' names -> torch's.
_DTYPES: Final = {
    "BOOL": "bool",
    "U8": "uint8",
    "I8": "int8",
    "I32": "int32",
    "I64": "int64",
    "F8_E4M3": "float8_e4m3fn",
    "F8_E8M0": "float8_e8m0fnu",
    "BF16": "bfloat16",
    "F16": "float16",
    "F32": "float32",
}


@dataclass(frozen=True, slots=True)
class QuantisedMatrix:
    """A matrix of the model that a checkpoint holds quantised."""

    format: MatrixFormat
    #: First suffix of each part of the format -> name of the tensor; parts that are not read are
    #: left out.
    tensors: Mapping[str, str]
    #: Names of all the tensors.
    names: frozenset[str]


def torch_dtype(name: str) -> torch.dtype:
    """The dtype that safetensors calls `name`, of those that hold a quantised matrix."""
    dtype = getattr(torch, _DTYPES[name])
    assert isinstance(dtype, torch.dtype)
    return dtype


@contextmanager
def blaming(checkpoint: TensorFiles[FileReader], matrix: QuantisedMatrix) -> Iterator[None]:
    """Turn a `BadPart` of the matrix into a `ModelLoadError` that names the tensor."""
    try:
        yield
    except BadPart as error:
        name = matrix.tensors[error.part]
        file = checkpoint.tensors[name].file
        raise ModelLoadError(str(error), file=file, tensor=name) from None


def fill_rows(target: torch.Tensor, rows: Rows, step: int) -> None:
    """Fill a matrix with its rows, `step` at a time. Threads share these tiles, whose operators are
    too short to be shared themselves."""

    def fill(first: int) -> None:
        end = min(first + step, len(target))
        target[first:end].copy_(rows(first, end))

    share(range(0, len(target), step), fill, alone=target.device.type != "cpu")


def find_quantised(
    checkpoint: TensorFiles[FileReader], matrix: str, shape: tuple[int, ...], scheme: Scheme
) -> QuantisedMatrix | None:
    """The tensors that hold `matrix` of this shape; None if the scheme has no format for it.

    Raises `ModelLoadError`, naming the tensor, if one is missing or has another shape or dtype."""
    stem = matrix.removesuffix(".weight")
    format = scheme.format(stem)
    if format is None or format.dimensions != len(shape):
        return None
    try:
        parts = format.parts(shape)
    except ValueError as error:
        raise ModelLoadError(
            f"{scheme.method} cannot hold it: {error}", file=str(checkpoint.folder), tensor=matrix
        ) from None
    tensors: dict[str, str] = {}
    names = set()
    for part in parts:
        name = _name(checkpoint, stem, part, matrix)
        if name is None:
            continue
        names.add(name)
        if not part.unread:
            _check(checkpoint, name, part)
            tensors[part.suffixes[0]] = name
    return QuantisedMatrix(format, tensors, frozenset(names))


def _name(checkpoint: TensorFiles[FileReader], stem: str, part: Part, matrix: str) -> str | None:
    for suffix in part.suffixes:
        if stem + suffix in checkpoint.tensors:
            return stem + suffix
    if part.optional:
        return None
    raise ModelLoadError(
        f"missing in the checkpoint: config.json says that {matrix} is quantised",
        file=str(checkpoint.folder),
        tensor=stem + part.suffixes[0],
    )


def _check(checkpoint: TensorFiles[FileReader], name: str, part: Part) -> None:
    stored = checkpoint.tensors[name]
    if part.shapes and stored.shape not in part.shapes:
        shapes = " or ".join(str(list(shape)) for shape in part.shapes)
        raise ModelLoadError(
            f"shape {list(stored.shape)}, config.json makes it {shapes}",
            file=stored.file,
            tensor=name,
        )
    if stored.dtype not in part.dtypes:
        raise ModelLoadError(
            f"dtype {stored.dtype}: must be one of {', '.join(part.dtypes)}",
            file=stored.file,
            tensor=name,
        )
