"""`read_config_json`: the unchecked `config.json` of a checkpoint."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Final

from asyncinfer.errors import ModelLoadError
from asyncinfer.files.folder import checkpoint_file
from asyncinfer.files.json_file import read_json

__all__ = ["CONFIG_JSON", "MOST_CONFIG_BYTES", "read_config_json"]

CONFIG_JSON: Final = "config.json"
MOST_CONFIG_BYTES: Final = 16 << 20


def read_config_json(folder: str | Path) -> tuple[dict[str, Any], str]:
    """The content of `folder/config.json`, unchecked, and the file's name for errors. Raises
    `ModelLoadError`."""
    folder = Path(folder)
    path = checkpoint_file(folder, CONFIG_JSON)
    if path is None:
        raise ModelLoadError("no such file", file=str(folder / CONFIG_JSON))
    return read_json(path, MOST_CONFIG_BYTES), str(path)
