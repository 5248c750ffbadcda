"""Gemma 3 as it is published from 4B on: a Gemma 3 with a tower for images, which is left out."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any, ClassVar

from asyncinfer.models.config import ModelConfig
from asyncinfer.models.gemma3 import Gemma3
from asyncinfer.models.text_part import TEXT_ALONE, text_values

__all__ = ["Gemma3Multimodal"]


class Gemma3Multimodal(Gemma3):
    """Gemma 3 with images, its text part: images are not supported."""

    model_type = "gemma3"
    defaults: ClassVar = {
        **Gemma3.defaults,
        "vocab_size": 262_208,
        "num_attention_heads": 8,
        "max_position_embeddings": 131_072,
    }

    def read(self, architecture: str, values: Mapping[str, Any], file: str) -> ModelConfig:
        config = super().read(architecture, text_values(values, file), file)
        names = replace(
            config.names,
            prefix="language_model.model.",
            head="language_model.lm_head",
            ignored=(*config.names.ignored, r"vision_tower\..*", r"multi_modal_projector\..*"),
        )
        return replace(config, names=names, notes=(TEXT_ALONE,))
