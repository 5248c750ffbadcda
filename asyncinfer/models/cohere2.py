"""Command A and Command R7B (Cohere, 2024): parallel blocks, a rotation in windowed layers only."""

from __future__ import annotations

from dataclasses import replace
from typing import ClassVar

from asyncinfer.models.config import ModelConfig
from asyncinfer.models.family import Family
from asyncinfer.models.reader import JsonReader
from asyncinfer.models.windows import sliding_layers, windowed

__all__ = ["Cohere2"]


class Cohere2(Family):
    """Command R7B and Command A: parallel residual, global layers without rotary embedding."""

    model_type = "cohere2"
    keys: ClassVar = {"rms_norm_eps": "layer_norm_eps"}
    defaults: ClassVar = {
        "layer_norm_eps": 1e-5,
        "tie_word_embeddings": True,
        "sliding_window": 4096,
        "sliding_window_pattern": 4,
    }

    def configure(self, config: JsonReader, llama: ModelConfig) -> ModelConfig:
        if not config.has("sliding_window"):
            raise config.refuse("sliding_window", "is required: layers with a window are rotated")
        assert llama.rope is not None
        rope = replace(llama.rope, interleaved=True)
        every = config.integer("sliding_window_pattern", 1, 1 << 10)
        sliding = sliding_layers(config, llama, lambda layer: (layer + 1) % every != 0)
        return replace(
            llama,
            block="parallel-shared",
            norm="layer",
            norm_bias=False,
            rope=rope,
            layers=windowed(config, replace(llama, rope=None), sliding, rope),
            mlp_bias=False,
            logit_scale=config.number("logit_scale", 1e-6, 1e6, 0.0625),
        )
