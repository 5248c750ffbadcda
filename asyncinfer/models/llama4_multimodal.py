"""Llama 4 as it is published: a tower for images stands beside it, which is left out."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from asyncinfer.models.config import ModelConfig
from asyncinfer.models.llama4 import Llama4
from asyncinfer.models.text_part import TEXT_ALONE, text_values

__all__ = ["Llama4Multimodal"]


class Llama4Multimodal(Llama4):
    """Llama 4 with images, such as Llama-4-Scout-17B-16E-Instruct, its text alone."""

    model_type = "llama4"

    def read(self, architecture: str, values: Mapping[str, Any], file: str) -> ModelConfig:
        config = super().read(architecture, text_values(values, file), file)
        names = replace(
            config.names,
            prefix="language_model.model.",
            head="language_model.lm_head",
            ignored=(*config.names.ignored, r"vision_model\..*", r"multi_modal_projector\..*"),
        )
        return replace(config, names=names, notes=(TEXT_ALONE,))
