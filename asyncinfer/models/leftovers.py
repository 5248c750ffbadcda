"""Decides which tensors of a checkpoint a decoder may leave unused."""

from __future__ import annotations

import re

from asyncinfer.models.config import ModelConfig

__all__ = ["ignored_tensor"]


def ignored_tensor(name: str, config: ModelConfig) -> bool:
    """Whether a checkpoint may hold this tensor though the model does not use it: the name matches
    `names.ignored`, or is the second copy of a tied head, or belongs to the layer that predicts a
    further token."""
    if config.tied_head and name == f"{config.names.head}.weight":
        return True
    predictor = config.names.predictor
    if predictor is not None and name.startswith(predictor.prefix):
        return not config.predicts or predictor.is_copy(name)
    return any(re.fullmatch(pattern, name) for pattern in config.names.ignored)
