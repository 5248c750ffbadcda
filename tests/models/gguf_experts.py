"""Sizes and rules of experts, and of DeepSeek's heads, as llama.cpp's converter writes them."""

from __future__ import annotations

from typing import Any

__all__ = ["glm_metadata", "latent_metadata"]


def latent_metadata(config: Any) -> dict[str, Any]:
    """Sizes by the names that they have where keys and values are apart, as V3's are, or not."""
    rotated, heads = config.qk_rope_head_dim, config.num_attention_heads
    size = config.qk_nope_head_dim + rotated
    apart = config.model_type == "deepseek_v3"
    grouped = apart or config.topk_method == "group_limited_greedy"
    values = {
        "attention.head_count_kv": 1 if apart else heads,
        "attention.key_length": config.kv_lora_rank + rotated if apart else size,
        "attention.value_length": config.kv_lora_rank if apart else config.v_head_dim,
        "attention.key_length_mla": size if apart else None,
        "attention.value_length_mla": config.v_head_dim if apart else None,
        "attention.q_lora_rank": config.q_lora_rank,
        "attention.kv_lora_rank": config.kv_lora_rank,
        "rope.dimension_count": rotated,
        "leading_dense_block_count": config.first_k_dense_replace,
        "expert_shared_count": config.n_shared_experts,
        "expert_weights_scale": float(config.routed_scaling_factor),
        "expert_weights_norm": config.norm_topk_prob,
        "expert_gating_func": 2 if apart else None,
        "expert_group_count": config.n_group if grouped else None,
        "expert_group_used_count": config.topk_group if grouped else None,
    }
    if config.rope_parameters["rope_type"] == "yarn":
        scale = config.rope_parameters["mscale_all_dim"]
        assert config.rope_parameters["mscale"] == scale
        values["rope.scaling.yarn_log_multiplier"] = 0.1 * scale
    return values


def glm_metadata(config: Any) -> dict[str, Any]:
    """The layer that predicts a further token is one more of a file's layers."""
    return {
        "block_count": config.num_hidden_layers + 1,
        "nextn_predict_layers": 1,
        "leading_dense_block_count": config.first_k_dense_replace,
        "expert_shared_count": config.n_shared_experts,
        "expert_weights_scale": float(config.routed_scaling_factor),
        "expert_weights_norm": config.norm_topk_prob,
        "expert_gating_func": 2,
        "expert_group_count": config.n_group,
        "expert_group_used_count": config.topk_group,
    }
