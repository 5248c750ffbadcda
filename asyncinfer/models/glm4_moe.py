"""GLM-4 with experts (Z.ai, 2025): grouped attention, and experts as DeepSeek-V3 has them."""

from __future__ import annotations

from dataclasses import replace
from typing import ClassVar

from asyncinfer.models.config import ModelConfig
from asyncinfer.models.experts import dense_first, read_grouped_experts, with_further_layers
from asyncinfer.models.family import Family
from asyncinfer.models.reader import JsonReader

__all__ = ["GLM4MoE"]


class GLM4MoE(Family):
    """GLM-4.5 and 4.6, GLM-4.5-Air: experts by sigmoid, one shared, half of each head rotated."""

    model_type = "glm4_moe"
    defaults: ClassVar = {
        "num_key_value_heads": 8,
        "rms_norm_eps": 1e-5,
        "partial_rotary_factor": 0.5,
        "n_routed_experts": 128,
        "num_experts_per_tok": 8,
        "moe_intermediate_size": 1408,
        "n_shared_experts": 1,
        "n_group": 1,
        "topk_group": 1,
        "norm_topk_prob": True,
        "routed_scaling_factor": 1.0,
        "first_k_dense_replace": 1,
    }
    partial_rotary = True

    def configure(self, config: JsonReader, llama: ModelConfig) -> ModelConfig:
        return replace(
            llama,
            qk_norm="head" if config.boolean("use_qk_norm", False) else None,
            out_bias=False,
            mlp_bias=False,
            experts=read_grouped_experts(config, llama),
            layers=dense_first(config, llama.num_layers, llama.rope),
            names=with_further_layers(config, llama),
        )
