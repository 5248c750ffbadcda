"""gpt-oss (OpenAI, 2025): experts with biases and a clamped gate, attention sinks, every other
layer windowed."""

from __future__ import annotations

from dataclasses import replace
from types import MappingProxyType
from typing import ClassVar

from asyncinfer.models.config import ModelConfig
from asyncinfer.models.experts import read_experts
from asyncinfer.models.family import Family
from asyncinfer.models.names import TensorNames
from asyncinfer.models.reader import JsonReader
from asyncinfer.models.windows import sliding_layers, windowed

__all__ = ["GptOss"]


class GptOss(Family):
    """gpt-oss: sinks, experts with biases, local and global layers in turns."""

    model_type = "gpt_oss"
    defaults: ClassVar = {
        "num_key_value_heads": 8,
        "head_dim": 64,
        "num_local_experts": 128,
        "num_experts_per_tok": 4,
        "rms_norm_eps": 1e-5,
        "rope_theta": 150_000.0,
        "sliding_window": 128,
        "attention_bias": True,
        "swiglu_alpha": 1.702,
        "swiglu_limit": 7.0,
        "rope_parameters": MappingProxyType(
            {
                "rope_type": "yarn",
                "factor": 32.0,
                "truncate": False,
                "original_max_position_embeddings": 4096,
            }
        ),
    }

    def configure(self, config: JsonReader, llama: ModelConfig) -> ModelConfig:
        experts = read_experts(config, llama, "num_local_experts", llama.intermediate_size)
        alpha = config.number("swiglu_alpha", 1e-3, 1e3)
        limit = config.number("swiglu_limit", 1e-3, 1e6)
        return replace(
            llama,
            sinks=True,
            layers=windowed(
                config, llama, sliding_layers(config, llama, lambda layer: layer % 2 == 0)
            ),
            experts=replace(experts, router_bias=True, bias=True, clamped_swiglu=(alpha, limit)),
            names=TensorNames(
                router="mlp.router",
                expert_up=("mlp.experts.gate_up_proj",),
                expert_up_alternates=True,
                expert_down="mlp.experts.down_proj",
            ),
        )
