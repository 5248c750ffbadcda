"""Small hybrids with random weights, whose layers keep a state or KV."""

from __future__ import annotations

from typing import Any

from models.families import GLOBAL, SEVEN_TO_ONE, SMALL
from transformers import (
    Lfm2Config,
    Lfm2MoeConfig,
    PreTrainedConfig,
    Qwen3_5TextConfig,
    Qwen3NextConfig,
)

from asyncinfer.models import Family
from asyncinfer.models.lfm2 import LFM2
from asyncinfer.models.lfm2_moe import LFM2MoE
from asyncinfer.models.qwen3_5 import Qwen35
from asyncinfer.models.qwen3_next import Qwen3Next

CONVOLUTION = "conv"
CONV: dict[str, Any] = {**SMALL, "block_multiple_of": 8}
MOE: dict[str, Any] = {
    **SMALL,
    "moe_intermediate_size": 24,
    "num_dense_layers": 1,
    "num_experts": 8,
    "num_experts_per_tok": 3,
}

LINEAR = "linear_attention"
DELTA: dict[str, Any] = {
    **SMALL,
    "head_dim": 16,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 12,
    "linear_value_head_dim": 10,
    # With less transformers' own float32 logits are as far as 1e-3 from those in float64: outputs
    # of small heads, which are normalised, may lie near zero.
    "rms_norm_eps": 1e-3,
}
DELTA_MOE: dict[str, Any] = {
    **DELTA,
    "moe_intermediate_size": 24,
    "shared_expert_intermediate_size": 20,
    "num_experts": 8,
    "num_experts_per_tok": 3,
}

#: Kind of hybrid -> its family and two shapes.
HYBRIDS: dict[str, tuple[type[Family], tuple[PreTrainedConfig, ...]]] = {
    "lfm2": (
        LFM2,
        (
            Lfm2Config(
                **CONV | {"num_hidden_layers": 3, "layer_types": [CONVOLUTION, GLOBAL, CONVOLUTION]}
            ),
            Lfm2Config(
                **CONV
                | {
                    "hidden_size": 96,
                    "num_attention_heads": 6,
                    "num_hidden_layers": 4,
                    "layer_types": [CONVOLUTION, CONVOLUTION, GLOBAL, GLOBAL],
                    "conv_bias": True,
                    "conv_L_cache": 5,
                    "tie_word_embeddings": False,
                    "block_auto_adjust_ff_dim": False,
                }
            ),
        ),
    ),
    "lfm2-moe": (
        LFM2MoE,
        (
            Lfm2MoeConfig(
                **MOE | {"num_hidden_layers": 3, "layer_types": [CONVOLUTION, GLOBAL, CONVOLUTION]}
            ),
            Lfm2MoeConfig(
                **MOE
                | {
                    "num_hidden_layers": 2,
                    "layer_types": [GLOBAL, CONVOLUTION],
                    "num_dense_layers": 0,
                    "num_experts_per_tok": 2,
                    "use_expert_bias": False,
                    "routed_scaling_factor": 1.7,
                    "conv_bias": True,
                }
            ),
        ),
    ),
    "qwen3-next": (
        Qwen3Next,
        (
            # A page of states takes less than a block of KV here, as the test of preemption needs.
            Qwen3NextConfig(
                **DELTA_MOE
                | {
                    "num_key_value_heads": 4,
                    "head_dim": 32,
                    "num_hidden_layers": 3,
                    "layer_types": [LINEAR, GLOBAL, LINEAR],
                }
            ),
            Qwen3NextConfig(
                **DELTA_MOE
                | {
                    "hidden_size": 96,
                    "num_attention_heads": 6,
                    "head_dim": 24,
                    "num_hidden_layers": 4,
                    "mlp_only_layers": [1],
                    "linear_num_key_heads": 3,
                    "linear_num_value_heads": 3,
                    "linear_conv_kernel_dim": 3,
                    "norm_topk_prob": False,
                    "attention_bias": True,
                    "tie_word_embeddings": True,
                    "rope_parameters": {
                        "rope_type": "default",
                        "rope_theta": 100_000.0,
                        "partial_rotary_factor": 0.5,
                    },
                }
            ),
        ),
    ),
    "qwen3.5": (
        Qwen35,
        (
            Qwen3_5TextConfig(
                **DELTA
                | {
                    "num_key_value_heads": 4,
                    "head_dim": 32,
                    "num_hidden_layers": 3,
                    "layer_types": [LINEAR, GLOBAL, LINEAR],
                }
            ),
            Qwen3_5TextConfig(
                **DELTA
                | {
                    **SEVEN_TO_ONE,
                    "num_hidden_layers": 4,
                    "linear_num_key_heads": 1,
                    "linear_num_value_heads": 3,
                    "linear_conv_kernel_dim": 2,
                    "tie_word_embeddings": True,
                }
            ),
        ),
    ),
}
