"""Qwen3 (Yang et al., 2025): Llama with a norm of each query and key head."""

from __future__ import annotations

from dataclasses import replace
from typing import ClassVar

from asyncinfer.models.config import ModelConfig
from asyncinfer.models.family import Family
from asyncinfer.models.reader import JsonReader
from asyncinfer.models.windows import windowed_if_used

__all__ = ["Qwen3"]

_MOST_LAYERS = 1 << 10


class Qwen3(Family):
    """Qwen3, dense."""

    model_type = "qwen3"
    defaults: ClassVar = {"head_dim": 128}

    def configure(self, config: JsonReader, llama: ModelConfig) -> ModelConfig:
        first = config.integer("max_window_layers", 0, _MOST_LAYERS, 28)
        layers = windowed_if_used(config, llama, lambda layer: layer >= first)
        return replace(llama, qk_norm="head", layers=layers)
