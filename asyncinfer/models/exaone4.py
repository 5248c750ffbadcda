"""EXAONE 4 (LG AI Research, 2025): norms after each part, rotation in windowed layers only."""

from __future__ import annotations

from dataclasses import replace
from typing import ClassVar

from asyncinfer.models.config import ModelConfig
from asyncinfer.models.family import Family
from asyncinfer.models.reader import JsonReader
from asyncinfer.models.windows import sliding_layers, windowed

__all__ = ["Exaone4"]


class Exaone4(Family):
    """EXAONE 4, such as EXAONE-4.0-32B: post-norm, global layers without rotary embedding."""

    model_type = "exaone4"
    defaults: ClassVar = {
        "rms_norm_eps": 1e-5,
        "num_key_value_heads": 32,
        "sliding_window": 4096,
        "sliding_window_pattern": 4,
    }

    def configure(self, config: JsonReader, llama: ModelConfig) -> ModelConfig:
        llama = replace(
            llama, block="post", qk_norm="head", qkv_bias=False, out_bias=False, mlp_bias=False
        )
        if not config.has("sliding_window"):
            # A model without windows rotates in all layers.
            return llama
        every = 1
        if not config.has("layer_types"):
            every = config.integer("sliding_window_pattern", 1, 1 << 10)
        sliding = sliding_layers(config, llama, lambda layer: (layer + 1) % every != 0)
        layers = windowed(config, replace(llama, rope=None), sliding, llama.rope)
        return replace(llama, layers=layers)
