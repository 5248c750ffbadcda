"""Qwen3.5 with experts as it is published: with a part for images, which is left out."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from asyncinfer.models.config import ModelConfig
from asyncinfer.models.qwen3_5_moe import Qwen35MoE
from asyncinfer.models.qwen3_5_multimodal import text_part
from asyncinfer.models.text_part import text_values

__all__ = ["Qwen35MoEMultimodal"]


class Qwen35MoEMultimodal(Qwen35MoE):
    """Qwen3.5 with experts and images, such as Qwen3.5-35B-A3B, its text model: images are not
    supported."""

    model_type = "qwen3_5_moe"

    def read(self, architecture: str, values: Mapping[str, Any], file: str) -> ModelConfig:
        return text_part(super().read(architecture, text_values(values, file), file))
