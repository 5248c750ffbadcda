"""`check_fetched`: refuses a model of the hub before its weights are fetched."""

from __future__ import annotations

from pathlib import Path

from asyncinfer.models.config_file import read_config
from asyncinfer.models.eagle3_config import is_eagle3
from asyncinfer.weights.gguf import is_gguf

__all__ = ["check_fetched"]


def check_fetched(folder: str | Path) -> None:
    """Refuse a folder whose `config.json` describes neither a model that can be loaded nor a head
    that drafts for one. It is a `check` of `resolve`: fetching weights may take hours. Raises
    `ModelLoadError`."""
    if not is_gguf(folder) and not is_eagle3(Path(folder)):
        read_config(folder)
