"""Experts, and DeepSeek's heads, as llama.cpp's converter writes them: sizes, rules and tensors."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np

__all__ = ["APART", "expert_metadata", "expert_pieces", "latent_metadata"]

#: Families whose keys and values are apart in a file.
APART = ("deepseek_v3", "glm_moe_dsa", "kimi_linear", "mistral4")
#: Families whose experts are scored by a sigmoid, and are in groups.
SIGMOID = ("afmoe", "deepseek_v3", "dots1", "exaone_moe", "glm4_moe", "glm_moe_dsa")

Array = np.ndarray[Any, Any]


def expert_metadata(config: Any) -> dict[str, Any]:
    """What is written of the experts of a family, beside what is of every family's."""
    kind = config.model_type
    if kind == "hunyuan_v1_moe":
        each = config.moe_topk
        return {
            "expert_used_count": each[0] if isinstance(each, list) else each,
            "expert_shared_feed_forward_length": config.intermediate_size,
            "expert_shared_count": 1,
        }
    if kind == "llama4_text":
        return {
            "feed_forward_length": config.intermediate_size_mlp,
            "expert_feed_forward_length": config.intermediate_size,
            "interleave_moe_layer_step": config.interleave_moe_layer_step,
            "leading_dense_block_count": 0,
        }
    if kind in ("glm4_moe", "exaone_moe"):
        # The layer that predicts a further token is one more of a file's layers.
        return {
            "block_count": config.num_hidden_layers + 1,
            "nextn_predict_layers": 1,
            **_rules(config),
        }
    if kind == "dots1":
        return _rules(config)
    if kind == "afmoe":
        return {
            "leading_dense_block_count": config.num_dense_layers,
            "expert_shared_count": config.num_shared_experts,
            "expert_weights_scale": float(config.route_scale),
            "expert_weights_norm": True,
            "expert_gating_func": 2,
        }
    if kind in ("deepseek_v2", *APART):
        return latent_metadata(config)
    return {}


def _rules(config: Any) -> dict[str, Any]:
    shared = "num_shared_experts" if config.model_type == "exaone_moe" else "n_shared_experts"
    kinds = getattr(config, "mlp_layer_types", None)
    dense = kinds.index("sparse") if kinds else config.first_k_dense_replace
    return {
        "leading_dense_block_count": dense,
        "expert_shared_count": getattr(config, shared),
        "expert_weights_scale": float(config.routed_scaling_factor),
        "expert_weights_norm": config.norm_topk_prob,
        "expert_gating_func": 2 if config.model_type in SIGMOID else None,
        "expert_group_count": config.n_group,
        "expert_group_used_count": config.topk_group,
    }


def latent_metadata(config: Any) -> dict[str, Any]:
    """Sizes by the names that they have where keys and values are apart, as V3's are, or not."""
    kind = config.model_type
    rotated, heads = config.qk_rope_head_dim, config.num_attention_heads
    size = config.qk_nope_head_dim + rotated
    apart = kind in APART
    values = {
        **_rules(config),
        "attention.head_count_kv": 1 if apart else heads,
        "attention.key_length": config.kv_lora_rank + rotated if apart else size,
        "attention.value_length": config.kv_lora_rank if apart else config.v_head_dim,
        "attention.key_length_mla": size if apart else None,
        "attention.value_length_mla": config.v_head_dim if apart else None,
        "attention.q_lora_rank": config.q_lora_rank,
        "attention.kv_lora_rank": config.kv_lora_rank,
        "rope.dimension_count": rotated,
    }
    if kind == "deepseek_v2" and config.topk_method != "group_limited_greedy":
        values |= {"expert_group_count": None, "expert_group_used_count": None}
    if kind == "glm_moe_dsa":
        values |= {
            "attention.indexer.head_count": config.index_n_heads,
            "attention.indexer.key_length": config.index_head_dim,
            "attention.indexer.top_k": config.index_topk,
        }
    if kind == "kimi_linear":
        values |= {
            "attention.head_count_kv": [int("full" in each) for each in config.layer_types],
            "ssm.conv_kernel": config.linear_conv_kernel_dim,
            "kda.head_dim": config.linear_head_dim,
            "expert_gating_func": 2,
            # Published configs have them under names that are not looked for.
            "expert_group_count": None,
            "expert_group_used_count": None,
            "expert_weights_norm": None,
        }
    rope = getattr(config, "rope_parameters", None) or {}
    if rope.get("rope_type") == "yarn":
        scale = rope["mscale_all_dim"]
        assert rope["mscale"] == scale
        values["rope.scaling.yarn_log_multiplier"] = 0.1 * scale
    return values


def expert_pieces(
    config: Any, architecture: str, name: str, values: Array
) -> Iterator[tuple[str, Array]] | None:
    """The tensors that a file has in the place of one of experts, or of DeepSeek's keys and values;
    None where it has the same. `architecture` is the file's."""
    kind = config.model_type
    if kind in APART and "kv_b_proj" in name:
        by_head = values.reshape(config.num_attention_heads, -1, values.shape[-1])
        keys, rest = np.split(by_head, [config.qk_nope_head_dim], axis=1)
        return iter(
            (
                (name.replace("kv_b", "k_b"), keys.swapaxes(1, 2)),
                (name.replace("kv_b", "v_b"), rest),
            )
        )
    if kind == "gemma4_text" and ".router." in name and name.endswith("scale"):
        layer = name.split(".")[2]
        stem = "ffn_down_exps" if "per_expert" in name else "ffn_gate_inp"
        return iter(((f"blk.{layer}.{stem}.scale", values),))
    if not name.endswith((".experts.gate_up_proj", ".experts.down_proj")):
        return None
    if kind == "gpt_oss":
        return None
    # GGUF's architectures whose files have gate and up in two tensors.
    apart = architecture in ("deepseek2", "llama4")
    if kind == "llama4_text":
        values = values.swapaxes(1, 2)
    if name.endswith("down_proj") or not apart:
        return iter(((f"{name}.weight", values),))
    gate, up = np.split(values, 2, axis=1)
    stem = name.removesuffix("gate_up_proj")
    return iter(((f"{stem}gate_proj.weight", gate), (f"{stem}up_proj.weight", up)))
