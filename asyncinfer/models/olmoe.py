"""OLMoE (Muennighoff et al., 2024): many small experts, and norms over all queries and all keys."""

from __future__ import annotations

from dataclasses import replace
from typing import ClassVar

from asyncinfer.models.config import ModelConfig
from asyncinfer.models.experts import read_experts
from asyncinfer.models.family import Family
from asyncinfer.models.reader import JsonReader

__all__ = ["OLMoE"]


class OLMoE(Family):
    """OLMoE, such as OLMoE-1B-7B-0924: small experts, norms over all queries and over all keys."""

    model_type = "olmoe"
    defaults: ClassVar = {"rms_norm_eps": 1e-5, "num_experts": 64, "num_experts_per_tok": 8}

    def configure(self, config: JsonReader, llama: ModelConfig) -> ModelConfig:
        if config.has("clip_qkv"):
            raise config.refuse("clip_qkv", "is not supported")
        key = "num_local_experts" if config.has("num_local_experts") else "num_experts"
        experts = replace(
            read_experts(config, llama, key, llama.intermediate_size),
            normalise=config.boolean("norm_topk_prob", False),
        )
        return replace(llama, qk_norm="projection", experts=experts)
