"""From a checkpoint's `config.json` to a `ModelConfig`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from asyncinfer.errors import ModelLoadError
from asyncinfer.models.config import ModelConfig
from asyncinfer.models.family_calls import FamilyCalls
from asyncinfer.models.gguf import gguf_config
from asyncinfer.models.quantised import read_scheme
from asyncinfer.models.reader import JsonReader
from asyncinfer.models.remote_code import NEVER_RUN, model_code
from asyncinfer.plugins import models
from asyncinfer.weights import checkpoint_file, read_json
from asyncinfer.weights.gguf import GgufCheckpoint, is_gguf

__all__ = ["MOST_BYTES", "parse_config", "read_config", "read_config_json"]

_FILE = "config.json"
MOST_BYTES = 16 << 20
#: How the names of architectures end, beside `Model` for what lacks a head.
_HEADS = ("ForCausalLM", "LMHeadModel")


def read_config(folder: str | Path) -> ModelConfig:
    """Read and check `folder/config.json`, or the metadata of a GGUF file. Raises
    `ModelLoadError`."""
    if is_gguf(folder):
        with GgufCheckpoint(folder) as checkpoint:
            return gguf_config(checkpoint)
    values, file = read_config_json(folder)
    return parse_config(values, file=file)


def read_config_json(folder: str | Path) -> tuple[dict[str, Any], str]:
    """The content of `folder/config.json`, unchecked, and the file's name for errors."""
    folder = Path(folder)
    path = checkpoint_file(folder, _FILE)
    if path is None:
        raise ModelLoadError("no such file", file=str(folder / _FILE))
    return read_json(path, MOST_BYTES), str(path)


def parse_config(values: Mapping[str, Any], *, file: str = _FILE) -> ModelConfig:
    """Read and check the content of a `config.json`. `ModelLoadError` names the key at fault."""
    config = JsonReader(values, file)
    architecture = _architecture(config)
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


def _architecture(config: JsonReader) -> str:
    names = config.values.get("architectures")
    if not isinstance(names, list) or not all(isinstance(name, str) for name in names):
        raise config.refuse("architectures", "must be a list of names")
    known = models.names()
    for name in names:
        if name in known:
            return str(name)
        # As a model that was saved without its head is called.
        stems = [name.removesuffix(end) for end in ("Model", "TextModel") if name.endswith(end)]
        for stem in stems:
            for head in _HEADS:
                if f"{stem}{head}" in known:
                    return f"{stem}{head}"
    more = ""
    if config.values.get("auto_map"):
        more = f"; its auto_map {NEVER_RUN}"
    if config.values.get("text_config"):
        more += "; it has a text_config, so that it is a model of more than text"
    raise config.refuse(
        "architectures",
        f"none of these is known{more}; must name one of {', '.join(known)}, or one that a package "
        "adds (docs/adding-a-model.md)",
    )
