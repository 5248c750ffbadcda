"""Ministral (Mistral AI, 2024): Mistral with windows in some layers only."""

from __future__ import annotations

from dataclasses import replace
from typing import ClassVar

from asyncinfer.models.config import ModelConfig
from asyncinfer.models.family import Family
from asyncinfer.models.reader import JsonReader
from asyncinfer.models.windows import sliding_layers, windowed

__all__ = ["Ministral"]


class Ministral(Family):
    """Ministral 8B as transformers writes it: layers with a window and without."""

    model_type = "ministral"
    defaults: ClassVar = {"num_key_value_heads": 8, "sliding_window": 4096}

    def configure(self, config: JsonReader, llama: ModelConfig) -> ModelConfig:
        sliding = sliding_layers(config, llama, lambda layer: config.has("sliding_window"))
        return replace(
            llama,
            qkv_bias=False,
            out_bias=False,
            mlp_bias=False,
            layers=windowed(config, llama, sliding),
        )
