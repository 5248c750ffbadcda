"""Values of Gemma 4's `config.json` from a GGUF file."""

from __future__ import annotations

from typing import Any, Final

from asyncinfer.models.gguf.facts import Facts
from asyncinfer.models.windows import FULL, SLIDING

__all__ = ["gemma4_values"]

#: Pairs that are not rotated have at least this factor.
_UNTURNED: Final = 1e20


def gemma4_values(facts: Facts) -> dict[str, Any]:
    """Heads and rotations of global and local layers. A file has the sizes of global layers under
    the plain names."""
    get = facts.get
    heads, widths = get("attention.head_count_kv"), get("feed_forward_length")
    local = facts.by_layer("attention.sliding_window_pattern")
    counts = facts.by_layer("attention.head_count_kv")
    by_kind = dict(zip(local, counts, strict=False)) if isinstance(heads, list) else {}
    turned = facts.numbers("rope_freqs.weight")
    whole = max(1, len(turned))
    # The factor of a pair that is not rotated is so large that its angle is zero.
    if not all(factor == 1.0 or factor >= _UNTURNED for factor in turned):
        raise facts.refuse_tensor("rope_freqs.weight", "must be of ones and of 1e30")
    share = sum(factor == 1.0 for factor in turned) / whole if turned else 1.0
    layers = range(len(local))
    own_values = [facts.has(f"blk.{layer}.attn_v.weight") for layer in layers if not local[layer]]
    return {
        "layer_types": [SLIDING if flag else FULL for flag in local],
        "head_dim": get("attention.key_length_swa"),
        "global_head_dim": get("attention.key_length"),
        "num_key_value_heads": by_kind.get(True, heads),
        "num_global_key_value_heads": by_kind.get(False),
        "attention_k_eq_v": bool(own_values) and not own_values[0],
        "num_kv_shared_layers": get("attention.shared_kv_layers") or 0,
        "intermediate_size": next(iter(widths), None) if isinstance(widths, list) else widths,
        "use_double_wide_mlp": isinstance(widths, list),
        "enable_moe_block": bool(get("expert_count")),
        "num_experts": get("expert_count"),
        "top_k_experts": get("expert_used_count"),
        "moe_intermediate_size": get("expert_feed_forward_length"),
        "hidden_size_per_layer_input": get("embedding_length_per_layer_input") or 0,
        "vocab_size_per_layer_input": facts.vocabulary,
        "rope_parameters": {
            SLIDING: {"rope_type": "default", "rope_theta": get("rope.freq_base_swa") or 10_000.0},
            FULL: {
                "rope_type": "proportional",
                "rope_theta": get("rope.freq_base"),
                "partial_rotary_factor": share,
            },
        },
        # The file's values for all rotations are set for each kind.
        "rope_scaling": None,
        "rope_theta": None,
        "partial_rotary_factor": None,
    }
