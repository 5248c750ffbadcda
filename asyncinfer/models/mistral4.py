"""Mistral 4 (Mistral AI, 2026): latent attention and experts as DeepSeek-V3 has them, with a
softmax over the experts, and queries that grow with their position."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from types import MappingProxyType
from typing import Any, ClassVar

from asyncinfer.models.config import ModelConfig
from asyncinfer.models.deepseek_v3 import DeepSeekV3
from asyncinfer.models.experts import read_grouped_experts
from asyncinfer.models.parts import ExpertsConfig
from asyncinfer.models.reader import JsonReader
from asyncinfer.models.temperatures import tempered

__all__ = ["Mistral4"]

_SHARE = "partial_rotary_factor"


class Mistral4(DeepSeekV3):
    """Mistral 4, such as Mistral-Small-4-119B, text."""

    model_type = "mistral4"
    defaults: ClassVar = {
        "q_lora_rank": 1024,
        "kv_lora_rank": 256,
        "qk_nope_head_dim": 64,
        "qk_rope_head_dim": 64,
        "v_head_dim": 128,
        "n_routed_experts": 128,
        "num_experts_per_tok": 4,
        "moe_intermediate_size": 2048,
        "n_shared_experts": 1,
        "n_group": 1,
        "topk_group": 1,
        "norm_topk_prob": True,
        "routed_scaling_factor": 1.0,
        "first_k_dense_replace": 0,
        "num_nextn_predict_layers": 0,
        "rope_parameters": MappingProxyType(
            {
                "rope_type": "yarn",
                "rope_theta": 10_000.0,
                "factor": 128.0,
                "original_max_position_embeddings": 8192,
                "mscale": 1.0,
                "mscale_all_dim": 1.0,
                "llama_4_scaling_beta": 0.1,
            }
        ),
    }

    def complete(self, values: Mapping[str, Any]) -> Mapping[str, Any]:
        """Without the rotated share of a head, which follows from the sizes of its parts."""
        whole = super().complete(values)
        plain, rotated = whole["qk_nope_head_dim"], whole["qk_rope_head_dim"]
        rope = whole["rope_parameters"]
        sized = type(plain) is int and type(rotated) is int and plain + rotated > 0
        if not sized or not isinstance(rope, Mapping):
            return whole
        if rope.get(_SHARE) != rotated / (plain + rotated):
            return whole
        without = {key: value for key, value in rope.items() if key != _SHARE}
        return {**whole, "rope_parameters": without}

    def configure(self, config: JsonReader, llama: ModelConfig) -> ModelConfig:
        base = super().configure(config, llama)
        names = replace(
            base.names, fused_experts=("mlp.experts.gate_up_proj", "mlp.experts.down_proj")
        )
        return replace(base, layers=tempered(config, base), names=names)

    def experts(self, config: JsonReader, llama: ModelConfig) -> ExpertsConfig:
        base = read_grouped_experts(config, llama)
        return replace(base, scoring="softmax", correction=False, group_best=2)
