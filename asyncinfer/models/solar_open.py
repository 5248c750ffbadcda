"""Solar Open (Upstage, 2025): GLM-4 with experts in every layer, and heads rotated wholly."""

from __future__ import annotations

from dataclasses import replace
from typing import ClassVar

from asyncinfer.models.config import ModelConfig
from asyncinfer.models.experts import read_grouped_experts
from asyncinfer.models.family import Family
from asyncinfer.models.reader import JsonReader

__all__ = ["SolarOpen"]


class SolarOpen(Family):
    """Solar Open, such as Solar-Open-100B: experts by sigmoid, one shared."""

    model_type = "solar_open"
    defaults: ClassVar = {
        "num_key_value_heads": 8,
        "head_dim": 128,
        "rms_norm_eps": 1e-5,
        "rope_theta": 1_000_000.0,
        "intermediate_size": 10_240,
        "n_routed_experts": 128,
        "num_experts_per_tok": 8,
        "moe_intermediate_size": 1280,
        "n_shared_experts": 1,
        "n_group": 1,
        "topk_group": 1,
        "norm_topk_prob": True,
        "routed_scaling_factor": 1.0,
    }

    def configure(self, config: JsonReader, llama: ModelConfig) -> ModelConfig:
        experts = read_grouped_experts(config, llama)
        return replace(llama, out_bias=False, mlp_bias=False, experts=experts)
