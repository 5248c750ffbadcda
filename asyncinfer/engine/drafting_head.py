"""Decides whether `EngineConfig.draft` is a head for the engine's model or a model of its own."""

from __future__ import annotations

from os import PathLike
from pathlib import Path

from asyncinfer.builtin import EMBEDDED
from asyncinfer.config import PREDICTOR, EngineConfig

__all__ = ["drafting_head"]


def drafting_head(config: EngineConfig) -> Path | None:
    """The folder of `config.draft` if it is a head, which the engine's model loads; None if it is a
    model of its own, or if there is none. Raises `ModelLoadError`."""
    named = config.draft
    if not isinstance(named, str | PathLike) or named in (PREDICTOR, EMBEDDED):
        return None
    from asyncinfer.models import check_fetched
    from asyncinfer.models.eagle3_config import is_eagle3
    from asyncinfer.weights import resolve

    folder = resolve(named if isinstance(named, str) else Path(named), check=check_fetched)
    return folder if is_eagle3(folder) else None
