"""From a checkpoint's `config.json` to a `ModelConfig`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from asyncinfer.files import CONFIG_JSON, read_config_json
from asyncinfer.models.config import ModelConfig
from asyncinfer.models.family_calls import FamilyCalls
from asyncinfer.models.gguf import gguf_config
from asyncinfer.models.quantised import read_scheme
from asyncinfer.models.reader import JsonReader
from asyncinfer.models.remote_code import model_code
from asyncinfer.plugins.architecture import find_architecture
from asyncinfer.weights.gguf import GgufCheckpoint, is_gguf

__all__ = ["parse_config", "read_config"]


def read_config(folder: str | Path) -> ModelConfig:
    """Read and check `folder/config.json`, or the metadata of a GGUF file. Raises
    `ModelLoadError`."""
    if is_gguf(folder):
        with GgufCheckpoint(folder) as checkpoint:
            return gguf_config(checkpoint)
    values, file = read_config_json(folder)
    return parse_config(values, file=file)


def parse_config(values: Mapping[str, Any], *, file: str = CONFIG_JSON) -> ModelConfig:
    """Read and check the content of a `config.json`. `ModelLoadError` names the key at fault."""
    config = JsonReader(values, file)
    architecture = find_architecture(values, file)
    family = FamilyCalls.find(architecture)
    notes = model_code(config, architecture, family.model_type())
    scheme = read_scheme(config)
    read = family.read(values, file)
    if scheme is None and not notes:
        return read
    if scheme is not None and read.names.transposed:
        raise config.refuse(
            "quantization_config", f"is not supported where weights are [in, out]: {architecture}"
        )
    return replace(read, scheme=scheme, notes=(*read.notes, *notes))
