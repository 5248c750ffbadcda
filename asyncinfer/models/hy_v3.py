"""Hy3 (Tencent, 2026): norms of each query and key head, and experts as DeepSeek-V3 has them."""

from __future__ import annotations

from dataclasses import replace
from typing import ClassVar

from asyncinfer.models.config import ModelConfig
from asyncinfer.models.experts import read_grouped_experts, sparse_by_list
from asyncinfer.models.family import Family
from asyncinfer.models.names import TensorNames
from asyncinfer.models.reader import JsonReader

__all__ = ["HyV3"]


class HyV3(Family):
    """Hy3, such as Hy3-preview: experts by sigmoid, one shared."""

    model_type = "hy_v3"
    keys: ClassVar = {
        "n_routed_experts": "num_experts",
        "n_shared_experts": "num_shared_experts",
        "routed_scaling_factor": "router_scaling_factor",
    }
    defaults: ClassVar = {
        "num_key_value_heads": 8,
        "head_dim": 128,
        "rms_norm_eps": 1e-5,
        "rope_theta": 11_158_840.0,
        "num_experts": 192,
        "num_experts_per_tok": 8,
        "num_shared_experts": 1,
        "moe_intermediate_size": 1536,
        "router_scaling_factor": 2.826,
        "first_k_dense_replace": 1,
        "n_group": 1,
        "topk_group": 1,
        "norm_topk_prob": True,
    }

    def configure(self, config: JsonReader, llama: ModelConfig) -> ModelConfig:
        # The layer that predicts a further token comes after all others.
        further = rf"model\.layers\.{llama.num_layers}\..*"
        return replace(
            llama,
            qk_norm="head",
            experts=read_grouped_experts(config, llama),
            layers=sparse_by_list(config, llama.num_layers, llama.rope),
            names=TensorNames(
                router="mlp.router.gate",
                correction="mlp.expert_bias",
                shared_up=("mlp.shared_mlp.gate_proj", "mlp.shared_mlp.up_proj"),
                shared_down="mlp.shared_mlp.down_proj",
                ignored=(*TensorNames().ignored, further),
            ),
        )
