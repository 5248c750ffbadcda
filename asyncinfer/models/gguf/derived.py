"""Values of `config.json` that follow from several keys of a GGUF file."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

__all__ = ["latent_values", "window_or_none"]


def window_or_none(get: Callable[[str], Any]) -> dict[str, Any]:
    """The window, which a file without that key does not have."""
    return {"sliding_window": get("attention.sliding_window")}


def latent_values(get: Callable[[str], Any]) -> dict[str, Any]:
    """Sizes of DeepSeek's heads and the rules of its experts. A key that a file lacks means what
    llama.cpp takes for it, not what the published models have."""
    rotated, groups = get("rope.dimension_count"), get("expert_group_count")
    # Files whose keys and values are apart give the sizes in the cache under the plain names.
    size = _first(get, "attention.key_length_mla", "attention.key_length")
    plain = size - rotated if type(size) is int and type(rotated) is int else None
    grouped = type(groups) is int and groups > 1
    return {
        "num_key_value_heads": get("attention.head_count"),
        "q_lora_rank": get("attention.q_lora_rank"),
        "qk_nope_head_dim": plain,
        "v_head_dim": _first(get, "attention.value_length_mla", "attention.value_length"),
        "n_shared_experts": get("expert_shared_count") or 0,
        "first_k_dense_replace": get("leading_dense_block_count") or 0,
        "routed_scaling_factor": get("expert_weights_scale") or 1.0,
        "norm_topk_prob": get("expert_weights_norm") or False,
        "topk_method": "group_limited_greedy" if grouped else "greedy",
        "n_group": groups if grouped else 1,
        "topk_group": get("expert_group_used_count") if grouped else 1,
    }


def _first(get: Callable[[str], Any], *keys: str) -> Any:
    return next((get(key) for key in keys if get(key) is not None), None)
