"""GLM-4.7-Flash (Z.ai, 2026): GLM-4 with experts, and DeepSeek-V3's latent attention."""

from __future__ import annotations

from typing import ClassVar

from asyncinfer.layers import RopeConfig
from asyncinfer.models.deepseek_v3 import DeepSeekV3
from asyncinfer.models.experts import sparse_by_list
from asyncinfer.models.parts import LayerConfig
from asyncinfer.models.reader import JsonReader

__all__ = ["GLM4MoELite"]


class GLM4MoELite(DeepSeekV3):
    """GLM-4.7-Flash: latent attention, one shared expert."""

    model_type = "glm4_moe_lite"
    defaults: ClassVar = {
        **DeepSeekV3.defaults,
        "rms_norm_eps": 1e-5,
        "q_lora_rank": 768,
        "qk_nope_head_dim": 192,
        "v_head_dim": 256,
        "n_routed_experts": 64,
        "num_experts_per_tok": 4,
        "moe_intermediate_size": 1536,
        "n_group": 1,
        "topk_group": 1,
        "routed_scaling_factor": 1.8,
        "first_k_dense_replace": 1,
    }

    def layers(
        self, config: JsonReader, count: int, rope: RopeConfig | None
    ) -> tuple[LayerConfig, ...]:
        return sparse_by_list(config, count, rope)
