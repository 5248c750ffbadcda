"""Qwen2 and Qwen2.5 (Yang et al., 2024): Llama with biases on queries, keys and values."""

from __future__ import annotations

from dataclasses import replace

from asyncinfer.models.config import ModelConfig
from asyncinfer.models.family import Family
from asyncinfer.models.parts import MOST_LAYERS
from asyncinfer.models.reader import JsonReader
from asyncinfer.models.windows import windowed_if_used

__all__ = ["Qwen2"]


class Qwen2(Family):
    """Qwen2, Qwen2.5 and QwQ."""

    model_type = "qwen2"

    def configure(self, config: JsonReader, llama: ModelConfig) -> ModelConfig:
        first = config.integer("max_window_layers", 0, MOST_LAYERS, 28)
        layers = windowed_if_used(config, llama, lambda layer: layer >= first)
        return replace(llama, qkv_bias=True, out_bias=False, layers=layers)
