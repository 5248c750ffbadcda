"""From a checkpoint's `config.json` to a `ModelConfig`."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from asyncinfer.errors import ModelLoadError, PluginError
from asyncinfer.models.config import ModelConfig
from asyncinfer.models.reader import JsonReader
from asyncinfer.plugins import models
from asyncinfer.weights import checkpoint_file, read_json

__all__ = ["parse_config", "read_config", "read_config_json"]

_FILE = "config.json"
_MOST_BYTES = 16 << 20


def read_config(folder: str | Path) -> ModelConfig:
    """Read and check `folder/config.json`."""
    values, file = read_config_json(folder)
    return parse_config(values, file=file)


def read_config_json(folder: str | Path) -> tuple[dict[str, Any], str]:
    """The content of `folder/config.json` as it stands, and what errors call the file."""
    folder = Path(folder)
    path = checkpoint_file(folder, _FILE)
    if path is None:
        raise ModelLoadError("no such file", file=str(folder / _FILE))
    return read_json(path, _MOST_BYTES), str(path)


def parse_config(values: Mapping[str, Any], *, file: str = _FILE) -> ModelConfig:
    """Read and check a `config.json`'s content; `ModelLoadError` names the key that lies."""
    config = JsonReader(values, file)
    architecture = _architecture(config)
    for key, why in (
        ("auto_map", "names code that comes with the checkpoint, which is never run"),
        (
            "quantization_config",
            "quantised checkpoints are not supported; save it dequantised, in bfloat16 say, first",
        ),
    ):
        if values.get(key):
            raise config.refuse(key, why)
    read = models.resolve(architecture).read(architecture, values, file)
    if not isinstance(read, ModelConfig):
        raise PluginError(
            f"plugin {architecture!r} (group {models.group}): read() gave {type(read).__name__}, "
            "not a ModelConfig"
        )
    return read


def _architecture(config: JsonReader) -> str:
    names = config.values.get("architectures")
    if not isinstance(names, list) or not all(isinstance(name, str) for name in names):
        raise config.refuse("architectures", "must be a list of names")
    known = models.names()
    for name in names:
        if name in known:
            return str(name)
    raise config.refuse(
        "architectures",
        f"none of these is known; must name one of {', '.join(known)}, or one that a package adds "
        "(docs/adding-a-model.md)",
    )
