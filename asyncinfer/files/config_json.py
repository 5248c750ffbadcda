"""`read_config_json`: the unchecked `config.json` of a checkpoint."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Final

from asyncinfer.errors import ModelLoadError
from asyncinfer.files.folder import checkpoint_file
from asyncinfer.files.json_file import read_json

__all__ = [
    "CONFIG_JSON",
    "MOST_CONFIG_BYTES",
    "QUANT_JSON",
    "read_config_file",
    "read_config_json",
]

CONFIG_JSON: Final = "config.json"
#: Where NVIDIA's Model Optimizer says how it quantised a model, often there alone.
QUANT_JSON: Final = "hf_quant_config.json"
MOST_CONFIG_BYTES: Final = 16 << 20


def read_config_json(folder: str | Path) -> tuple[dict[str, Any], str]:
    """The content of `folder/config.json`, unchecked, and the file's name for errors. The content
    of `hf_quant_config.json` is in it, under that file's name. Raises `ModelLoadError`."""
    folder = Path(folder)
    path = checkpoint_file(folder, CONFIG_JSON)
    if path is None:
        raise ModelLoadError("no such file", file=str(folder / CONFIG_JSON))
    return read_config_file(path), str(path)


def read_config_file(path: Path) -> dict[str, Any]:
    """The same of a `config.json` by its path, whatever it is called."""
    values = read_json(path, MOST_CONFIG_BYTES)
    if path.name == CONFIG_JSON:
        quantised = checkpoint_file(path.parent, QUANT_JSON)
        if quantised is not None:
            values[QUANT_JSON] = read_json(quantised, MOST_CONFIG_BYTES)
    return values
