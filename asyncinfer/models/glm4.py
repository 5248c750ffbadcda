"""GLM-4 of 2025 (Zhipu AI): sandwich norms, and half of each head rotated, interleaved."""

from __future__ import annotations

from dataclasses import replace
from typing import ClassVar

from asyncinfer.models.config import ModelConfig
from asyncinfer.models.family import Family
from asyncinfer.models.names import TensorNames
from asyncinfer.models.reader import JsonReader

__all__ = ["GLM4"]


class GLM4(Family):
    """GLM-4, such as GLM-4-9B-0414: sandwich norms, half of each head rotated, interleaved."""

    model_type = "glm4"
    defaults: ClassVar = {
        "num_key_value_heads": 2,
        "head_dim": 128,
        "rms_norm_eps": 1.5625e-07,
        "attention_bias": True,
        "partial_rotary_factor": 0.5,
    }
    partial_rotary = True

    def configure(self, config: JsonReader, llama: ModelConfig) -> ModelConfig:
        assert llama.rope is not None
        return replace(
            llama,
            block="sandwich",
            rope=replace(llama.rope, interleaved=True),
            out_bias=False,
            names=TensorNames(
                attention_out_norm="post_self_attn_layernorm",
                mlp_out_norm="post_mlp_layernorm",
                up=("mlp.gate_up_proj",),
            ),
        )
