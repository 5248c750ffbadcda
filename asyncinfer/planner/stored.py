"""The types that a GGUF file or a quantised checkpoint stores its weights in, and their bytes."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from gguf import GGML_QUANT_SIZES, GGMLQuantizationType

from asyncinfer.errors import ModelLoadError
from asyncinfer.kernels.block_types import BLOCK_TYPES
from asyncinfer.kernels.layouts import WeightLayout
from asyncinfer.models import ModelConfig, tensor_table
from asyncinfer.planner.formats import DTYPE_BYTES, Format
from asyncinfer.planner.size import part_of
from asyncinfer.quantization import block_layout
from asyncinfer.quantization.schemes import MatrixFormat
from asyncinfer.weights import torch_dtype
from asyncinfer.weights.gguf import read_header, split_names

__all__ = ["StoredType", "quantised_types", "stored_format", "stored_types"]

#: Matrices of the layers, as in `ModelSize`: not a router, not the head weights of an indexer, and
#: not a norm that a file has in rows.
_LINEAR: Final = re.compile(
    r"blk\.\d+\.(?!ffn_gate_inp\.|indexer\.proj\.|ssm_norm\.)((shortconv|indexer)\.)?\w+\.weight"
)


@dataclass(frozen=True, slots=True, kw_only=True)
class StoredType:
    """The tensors of one type."""

    #: ggml's name, such as "Q4_K"; or a method of `quantization_config`, or a dtype.
    name: str
    tensors: int
    #: Numbers, and the bytes that these take in the file.
    numbers: int
    bytes: int
    #: The part of both that is in matrices of the layers.
    linear_numbers: int
    linear_bytes: int
    #: Numbers that stay quantised in a GPU's memory, and their bytes there, in matrices of the
    #: layers or of the head.
    kept_numbers: int
    kept_bytes: int
    linear_kept_numbers: int
    linear_kept_bytes: int


def stored_types(path: Path) -> tuple[StoredType, ...]:
    """The types in the model that `path` is the first file of, the one with most bytes first. Reads
    headers only. Raises `ModelLoadError`."""
    found: dict[str, list[int]] = {}
    for name in split_names(path.name):
        part = path.with_name(name)
        for tensor, info in read_header(part).tensors.items():
            try:
                kind = GGMLQuantizationType(info.kind)
            except ValueError:
                raise ModelLoadError(
                    f"type {info.kind} is not known", file=str(part), tensor=tensor
                ) from None
            block, size = GGML_QUANT_SIZES[kind]
            numbers = math.prod(info.shape)
            taken = numbers // block * size
            linear = len(info.shape) > 1 and _LINEAR.fullmatch(tensor) is not None
            code = kind.name.lower()
            stays = code in BLOCK_TYPES and (linear or tensor == "output.weight")
            layout = block_layout(code) if stays else None
            kept = _kept(layout, numbers, info.shape[-1])
            _count(found, kind.name, numbers, taken, kept, linear)
    return _types(found)


def quantised_types(config: ModelConfig, dtype: str) -> tuple[StoredType, ...]:
    """The types in a checkpoint in the Hugging Face format, as far as its config says: which
    matrices of layers are quantised, with scales in the usual dtype. The rest is in `dtype`."""
    found: dict[str, list[int]] = {}
    for name, packed in tensor_table(config).items():
        linear = part_of(name, len(packed.shape)) in ("linear", "experts")
        for piece in packed.pieces:
            numbers, method, kept = math.prod(piece.shape), dtype, 0
            taken = round(numbers * DTYPE_BYTES[dtype])
            if linear and config.scheme is not None:
                format = config.scheme.planned(piece.name.removesuffix(".weight"))
                if format is not None and format.dimensions == len(piece.shape):
                    method, taken = config.scheme.method, _bytes(format, piece.shape)
                    kept = _kept(format.layout, numbers, piece.shape[-1])
            _count(found, method, numbers, taken, kept, linear)
    return _types(found)


def _bytes(format: MatrixFormat, shape: tuple[int, ...]) -> int:
    """Bytes of a matrix's numbers, scales and zero points."""
    try:
        parts = format.parts(shape)
    except ValueError as error:
        raise ModelLoadError(f"a matrix of {list(shape)}: {error}", file="config.json") from None
    return sum(
        math.prod(part.shapes[0]) * torch_dtype(part.dtypes[0]).itemsize
        for part in parts
        if part.shapes and not part.optional
    )


def _kept(layout: WeightLayout | None, numbers: int, inputs: int) -> int:
    """Bytes in a GPU's memory of numbers that stay quantised there; 0 if they do not stay so."""
    return 0 if layout is None or not layout.readable else round(numbers * layout.bytes(inputs))


def _count(
    found: dict[str, list[int]], name: str, numbers: int, taken: int, kept: int, linear: bool
) -> None:
    counts = found.setdefault(name, [0] * 9)
    sizes = (numbers, taken), (numbers * (kept > 0), kept)
    more = [1, *(each * part for pair in sizes for part in (1, linear) for each in pair)]
    counts[:] = (a + b for a, b in zip(counts, more, strict=True))


def _types(found: dict[str, list[int]]) -> tuple[StoredType, ...]:
    """The types found, the one with most bytes first."""
    types = (
        StoredType(
            name=name,
            tensors=tensors,
            numbers=numbers,
            bytes=taken,
            linear_numbers=linear_numbers,
            linear_bytes=linear_bytes,
            kept_numbers=kept_numbers,
            kept_bytes=kept_bytes,
            linear_kept_numbers=linear_kept_numbers,
            linear_kept_bytes=linear_kept_bytes,
        )
        for name, (
            tensors,
            numbers,
            taken,
            linear_numbers,
            linear_bytes,
            kept_numbers,
            kept_bytes,
            linear_kept_numbers,
            linear_kept_bytes,
        ) in found.items()
    )
    return tuple(sorted(types, key=lambda one: one.bytes, reverse=True))


def stored_format(types: Iterable[StoredType], dtype: str) -> Format:
    """The weights as a GPU holds a file's: numbers that its kernels read as they are, others in
    `dtype`."""
    types, size = tuple(types), DTYPE_BYTES[dtype]
    # A model in float32 computes with floats.
    keeps = dtype != "float32"
    linear = sum(one.linear_numbers for one in types)
    others = sum(one.numbers for one in types) - linear
    linear_bytes = linear * size + keeps * sum(
        one.linear_kept_bytes - one.linear_kept_numbers * size for one in types
    )
    whole = (linear + others) * size + keeps * sum(
        one.kept_bytes - one.kept_numbers * size for one in types
    )
    return Format(
        name="as stored",
        linear=linear_bytes / max(1, linear),
        others=(whole - linear_bytes) / max(1, others),
    )
