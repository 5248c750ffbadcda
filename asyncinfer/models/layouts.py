"""How the matrices of a model will lie in a GPU's memory, known before any is loaded."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

from asyncinfer.kernels.layouts import WeightLayout
from asyncinfer.models.config import ModelConfig
from asyncinfer.quantization import STORAGE_LAYOUTS, block_layout
from asyncinfer.weights import open_checkpoint

__all__ = ["scheme_layouts", "weight_layouts"]


def weight_layouts(
    folder: str | Path, config: ModelConfig, storage: str
) -> tuple[WeightLayout, ...]:
    """The layouts that kernels read of a checkpoint's matrices, stored as `storage` names. Reads
    headers alone. Raises `ModelLoadError`."""
    if storage in STORAGE_LAYOUTS:
        found = {STORAGE_LAYOUTS[storage]}
    elif storage != "plain":
        found = set()
    elif config.scheme is not None:
        return scheme_layouts(config)
    else:
        with open_checkpoint(folder) as checkpoint:
            types = {checkpoint.block_type(name) for name in checkpoint.tensors}
            found = {block_layout(code) for code in types if code is not None}
        found |= _joined(found)
    return tuple(sorted(layout for layout in found if layout.readable))


def scheme_layouts(config: ModelConfig) -> tuple[WeightLayout, ...]:
    """The layouts that kernels read of the formats in a checkpoint's `config.json`."""
    formats = () if config.scheme is None else config.scheme.formats
    found = {format.layout for _, format in formats}
    return tuple(sorted(layout for layout in found if layout is not None and layout.readable))


def _joined(layouts: Iterable[WeightLayout]) -> set[WeightLayout]:
    """The layout of whole-number matrices with several layouts that are held as one."""
    whole = [layout for layout in layouts if layout.code in ("int4", "int8")]
    if len(whole) < 2:
        return set()
    offsets = any(layout.offsets for layout in whole)
    code = whole[0].code if len({layout.code for layout in whole}) == 1 else "int8"
    return {WeightLayout(code, min(layout.group for layout in whole), offsets)}
