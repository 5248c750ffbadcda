"""Gemma 4 as it is published: towers for images and sounds stand beside it, which are left out."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from asyncinfer.models.config import ModelConfig
from asyncinfer.models.gemma4 import Gemma4
from asyncinfer.models.text_part import TEXT_ALONE, text_values

__all__ = ["Gemma4Multimodal"]


class Gemma4Multimodal(Gemma4):
    """Gemma 4 with images and sounds, such as gemma-4-E2B-it, its text alone."""

    model_type = "gemma4"

    def read(self, architecture: str, values: Mapping[str, Any], file: str) -> ModelConfig:
        config = super().read(architecture, text_values(values, file), file)
        names = replace(
            config.names,
            prefix="model.language_model.",
            ignored=(
                *config.names.ignored,
                r"model\.(vision_tower|embed_vision|audio_tower|embed_audio)\..*",
            ),
        )
        return replace(config, names=names, notes=(TEXT_ALONE,))
