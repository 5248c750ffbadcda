"""CWM (Meta, 2025): Llama with a window in three layers of four."""

from __future__ import annotations

from dataclasses import replace
from typing import ClassVar

from asyncinfer.models.config import ModelConfig
from asyncinfer.models.family import Family
from asyncinfer.models.reader import JsonReader
from asyncinfer.models.windows import sliding_layers, windowed

__all__ = ["CWM"]


class CWM(Family):
    """Code World Model, such as cwm: Llama, local and global layers in turns."""

    model_type = "cwm"
    defaults: ClassVar = {
        "num_key_value_heads": 8,
        "head_dim": 128,
        "rms_norm_eps": 1e-5,
        "sliding_window": 8192,
        "rope_parameters": {
            "rope_type": "llama3",
            "rope_theta": 1_000_000.0,
            "factor": 16.0,
            "high_freq_factor": 4.0,
            "low_freq_factor": 1.0,
            "original_max_position_embeddings": 8192,
        },
    }

    def configure(self, config: JsonReader, llama: ModelConfig) -> ModelConfig:
        sliding = sliding_layers(config, llama, lambda layer: layer % 4 != 0)
        layers = windowed(config, llama, sliding)
        return replace(llama, layers=layers, qkv_bias=False, out_bias=False)
