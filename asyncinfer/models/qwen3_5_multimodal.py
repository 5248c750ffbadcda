"""Qwen3.5 as it is published: with a part for images, which is left out."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from asyncinfer.models.config import ModelConfig
from asyncinfer.models.qwen3_5 import Qwen35
from asyncinfer.models.text_part import TEXT_ALONE, text_values

__all__ = ["Qwen35Multimodal", "text_part"]


class Qwen35Multimodal(Qwen35):
    """Qwen3.5 with images, such as Qwen3.5-9B, its text model: images are not supported."""

    model_type = "qwen3_5"

    def read(self, architecture: str, values: Mapping[str, Any], file: str) -> ModelConfig:
        return text_part(super().read(architecture, text_values(values, file), file))


def text_part(config: ModelConfig) -> ModelConfig:
    """The model without the tensors for images, its own by their names among those."""
    names = replace(
        config.names,
        prefix="model.language_model.",
        ignored=(*config.names.ignored, r"model\.visual\..*"),
    )
    return replace(config, names=names, notes=(TEXT_ALONE,))
