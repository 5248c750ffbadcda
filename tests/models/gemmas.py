"""Small Gemma 4s with random weights: layers that differ in their heads, share keys and values, and
are given inputs of their own."""

from __future__ import annotations

from typing import Any

from models.families import GLOBAL, LOCAL, SEVEN_TO_ONE, SMALL, THREE_TO_ONE
from transformers import Gemma4TextConfig, PreTrainedConfig

from asyncinfer.models import Family
from asyncinfer.models.gemma4 import Gemma4

COMMON: dict[str, Any] = {
    **SMALL,
    "head_dim": 16,
    "sliding_window": 20,
    "hidden_size_per_layer_input": 0,
    "vocab_size_per_layer_input": 199,
}

EXPERTS: dict[str, Any] = {
    "enable_moe_block": True,
    "num_experts": 6,
    "top_k_experts": 2,
    "moe_intermediate_size": 24,
}

#: As in `HYBRIDS`.
GEMMAS: dict[str, tuple[type[Family], tuple[PreTrainedConfig, ...]]] = {
    "gemma4-shared": (
        Gemma4,
        (
            Gemma4TextConfig(
                **COMMON
                | {
                    "num_hidden_layers": 6,
                    "num_key_value_heads": 1,
                    "global_head_dim": 24,
                    "hidden_size_per_layer_input": 12,
                    "layer_types": [LOCAL, GLOBAL, LOCAL, LOCAL, LOCAL, GLOBAL],
                    "num_kv_shared_layers": 3,
                    "use_double_wide_mlp": True,
                    "final_logit_softcapping": 20.0,
                    # With a tied head so small a model repeats itself.
                    "tie_word_embeddings": False,
                }
            ),
            Gemma4TextConfig(
                **COMMON
                | THREE_TO_ONE
                | {
                    "num_hidden_layers": 5,
                    "global_head_dim": 40,
                    "hidden_size_per_layer_input": 7,
                    # With less transformers' own float32 logits are further from those in float64
                    # than 1e-4: the norm of so few numbers may divide by little.
                    "rms_norm_eps": 1e-3,
                    "layer_types": [GLOBAL, LOCAL, LOCAL, GLOBAL, GLOBAL],
                    "num_kv_shared_layers": 2,
                    "attention_k_eq_v": True,
                    "num_global_key_value_heads": 3,
                    "attention_bias": True,
                }
            ),
        ),
    ),
    "gemma4-experts": (
        Gemma4,
        (
            Gemma4TextConfig(
                **COMMON
                | EXPERTS
                | {
                    "num_hidden_layers": 3,
                    "num_global_key_value_heads": 1,
                    "attention_k_eq_v": True,
                    "global_head_dim": 24,
                    "layer_types": [LOCAL, LOCAL, GLOBAL],
                    "tie_word_embeddings": False,
                }
            ),
            Gemma4TextConfig(
                **COMMON
                | EXPERTS
                | SEVEN_TO_ONE
                | {
                    "num_hidden_layers": 2,
                    "global_head_dim": 20,
                    "layer_types": [LOCAL, GLOBAL],
                    "hidden_size_per_layer_input": 7,
                    "num_experts": 5,
                    "top_k_experts": 3,
                    "rms_norm_eps": 1e-3,
                }
            ),
        ),
    ),
    "gemma4-dense": (
        Gemma4,
        (
            Gemma4TextConfig(
                **COMMON
                | THREE_TO_ONE
                | {
                    "num_hidden_layers": 3,
                    "num_global_key_value_heads": 1,
                    "attention_k_eq_v": True,
                    "global_head_dim": 32,
                    "layer_types": [LOCAL, LOCAL, GLOBAL],
                    "tie_word_embeddings": False,
                }
            ),
            Gemma4TextConfig(
                **COMMON | {"num_hidden_layers": 7, "head_dim": 24, "global_head_dim": 20}
            ),
        ),
    ),
}
