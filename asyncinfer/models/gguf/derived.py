"""Values of `config.json` derived from several keys of a GGUF file, or from its tensors."""

from __future__ import annotations

from typing import Any, Final

from asyncinfer.models.gguf.facts import Facts
from asyncinfer.models.windows import FULL

__all__ = [
    "exaone_moe_values",
    "glm_moe_values",
    "granite_experts",
    "granite_shared_values",
    "indexed_values",
    "latent_values",
    "llama4_values",
    "window_or_none",
]


#: The number of experts in Llama 4 Maverick.
_MAVERICK: Final = 128
#: From this context on, GLM-5's layers share their indexers' choices.
_SHARED_CHOICES: Final = 1 << 20


def window_or_none(facts: Facts) -> dict[str, Any]:
    """The window; None for a file without that key, or with 0."""
    return {"sliding_window": facts.get("attention.sliding_window") or None}


def latent_values(facts: Facts) -> dict[str, Any]:
    """Sizes of DeepSeek's heads and the rules of its experts. A missing key has llama.cpp's
    default, not the value of the published models."""
    get = facts.get
    rotated, groups = get("rope.dimension_count"), get("expert_group_count")
    # Files with separate keys and values have the sizes in the cache under the plain names.
    size = _first(facts, "attention.key_length_mla", "attention.key_length")
    plain = size - rotated if type(size) is int and type(rotated) is int else None
    grouped = type(groups) is int and groups > 1
    return {
        "num_key_value_heads": get("attention.head_count"),
        "q_lora_rank": get("attention.q_lora_rank"),
        "qk_nope_head_dim": plain,
        "v_head_dim": _first(facts, "attention.value_length_mla", "attention.value_length"),
        "n_shared_experts": get("expert_shared_count") or 0,
        "first_k_dense_replace": get("leading_dense_block_count") or 0,
        "routed_scaling_factor": get("expert_weights_scale") or 1.0,
        "norm_topk_prob": get("expert_weights_norm") or False,
        "topk_method": "group_limited_greedy" if grouped else "greedy",
        "n_group": groups if grouped else 1,
        "topk_group": get("expert_group_used_count") if grouped else 1,
    }


def indexed_values(facts: Facts) -> dict[str, Any]:
    """`latent_values`, and which layers have an indexer of their own. Files that do not list them
    all have one in each, except GLM-5.2's, which have a longer context."""
    listed = facts.by_layer("attention.indexer.types")
    context = facts.get("context_length")
    later = type(context) is int and context >= _SHARED_CHOICES
    return {
        **latent_values(facts),
        **({"indexer_types": ["full" if own else "shared" for own in listed]} if listed else {}),
        "index_topk_freq": 4 if later else 1,
    }


def llama4_values(facts: Facts) -> dict[str, Any]:
    """Whether queries and keys have norms: in all models but Maverick, as in llama.cpp."""
    if facts.get("attention.sliding_window") == 0:
        raise facts.refuse(
            "attention.sliding_window", "Llama 4 without chunked attention is not supported"
        )
    return {"use_qk_norm": facts.get("expert_count") != _MAVERICK}


def exaone_moe_values(facts: Facts) -> dict[str, Any]:
    """Which layers have no experts."""
    return {
        **window_or_none(facts),
        "first_k_dense_replace": facts.get("leading_dense_block_count") or 0,
    }


def glm_moe_values(facts: Facts) -> dict[str, Any]:
    """The rules of GLM's experts, and whether heads have norms."""
    return {
        "n_shared_experts": facts.get("expert_shared_count") or 0,
        "first_k_dense_replace": facts.get("leading_dense_block_count") or 0,
        "use_qk_norm": "attn_q_norm.weight" in facts.parts,
    }


def granite_shared_values(facts: Facts) -> dict[str, Any]:
    """Granite 4 whose layers all attend."""
    kinds = [FULL for _ in facts.by_layer("attention.head_count")]
    return {
        **granite_experts(facts),
        "layer_types": kinds,
        "position_embedding_type": "rope",
    }


def granite_experts(facts: Facts) -> dict[str, Any]:
    """The numbers and sizes of Granite 4's experts, or of its single feed-forward layer."""
    width = _first(facts, "expert_shared_feed_forward_length", "feed_forward_length")
    return {"num_local_experts": facts.get("expert_count") or 0, "shared_intermediate_size": width}


def _first(facts: Facts, *keys: str) -> Any:
    return next((facts.get(key) for key in keys if facts.get(key) is not None), None)
