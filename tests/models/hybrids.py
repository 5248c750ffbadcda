"""Small hybrids with random weights, whose layers keep a state or KV."""

from __future__ import annotations

from typing import Any

from models.families import GLOBAL, MULTIPLIERS, SEVEN_TO_ONE, SMALL, THREE_TO_ONE
from transformers import (
    FalconH1Config,
    GraniteMoeHybridConfig,
    KimiLinearConfig,
    Lfm2Config,
    Lfm2MoeConfig,
    NemotronHConfig,
    OlmoHybridConfig,
    PreTrainedConfig,
    Qwen3_5MoeTextConfig,
    Qwen3_5TextConfig,
    Qwen3NextConfig,
)

from asyncinfer.models import Family
from asyncinfer.models.falcon_h1 import FalconH1
from asyncinfer.models.granitemoehybrid import GraniteHybrid
from asyncinfer.models.kimi_linear import KimiLinear
from asyncinfer.models.lfm2 import LFM2
from asyncinfer.models.lfm2_moe import LFM2MoE
from asyncinfer.models.nemotron_h import NemotronH
from asyncinfer.models.olmo_hybrid import OLMoHybrid
from asyncinfer.models.qwen3_5 import Qwen35
from asyncinfer.models.qwen3_5_moe import Qwen35MoE
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
OLMO: dict[str, Any] = {
    **{key: value for key, value in DELTA.items() if key != "head_dim"},
    "num_key_value_heads": 4,
}

KIMI: dict[str, Any] = {
    **SMALL,
    "num_key_value_heads": 4,
    "kv_lora_rank": 32,
    "qk_nope_head_dim": 20,
    "qk_rope_head_dim": 8,
    "v_head_dim": 12,
    "num_local_experts": 8,
    "num_experts_per_tok": 3,
    "moe_intermediate_size": 24,
    # As small a state as for Qwen3-Next.
    "linear_num_heads": 2,
    "linear_head_dim": 4,
    "rms_norm_eps": 1e-3,
}

MAMBA: dict[str, Any] = {
    **SMALL,
    "mamba_n_heads": 8,
    "mamba_d_state": 12,
    "mamba_n_groups": 2,
    # transformers' own, which a prompt of a test goes beyond.
    "mamba_chunk_size": 16,
    "rms_norm_eps": 1e-3,
}
NEMOTRON: dict[str, Any] = {
    **{key: value for key, value in SMALL.items() if key != "num_hidden_layers"},
    "head_dim": 24,
    "mamba_num_heads": 6,
    "mamba_head_dim": 10,
    "ssm_state_size": 12,
    "n_groups": 2,
    "chunk_size": 16,
    "layer_norm_epsilon": 1e-3,
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
    "qwen3.5-moe": (
        Qwen35MoE,
        (
            Qwen3_5MoeTextConfig(
                **DELTA_MOE
                | {
                    "num_key_value_heads": 4,
                    "head_dim": 32,
                    "num_hidden_layers": 3,
                    "layer_types": [LINEAR, GLOBAL, LINEAR],
                }
            ),
            Qwen3_5MoeTextConfig(
                **DELTA_MOE
                | {
                    **SEVEN_TO_ONE,
                    "num_hidden_layers": 2,
                    "full_attention_interval": 2,
                    "linear_num_key_heads": 1,
                    "linear_num_value_heads": 3,
                    "num_experts": 5,
                    "num_experts_per_tok": 1,
                }
            ),
        ),
    ),
    "olmo-hybrid": (
        OLMoHybrid,
        (
            OlmoHybridConfig(
                **OLMO | {"num_hidden_layers": 3, "layer_types": [LINEAR, GLOBAL, LINEAR]}
            ),
            OlmoHybridConfig(
                **OLMO
                | {
                    **THREE_TO_ONE,
                    "num_hidden_layers": 4,
                    "linear_num_key_heads": 1,
                    "linear_num_value_heads": 3,
                    "linear_key_head_dim": 10,
                    "linear_value_head_dim": 14,
                    "linear_conv_kernel_dim": 3,
                    "linear_allow_neg_eigval": False,
                    "attention_bias": True,
                    "tie_word_embeddings": True,
                    "rope_parameters": {"rope_type": "default", "rope_theta": None},
                }
            ),
        ),
    ),
    "granite-4": (
        GraniteHybrid,
        (
            GraniteMoeHybridConfig(
                **MAMBA
                | MULTIPLIERS
                | {
                    # As small a state as for Qwen3-Next.
                    "num_key_value_heads": 4,
                    "mamba_expand": 1,
                    "mamba_d_state": 4,
                    "num_hidden_layers": 3,
                    "layer_types": [LINEAR, GLOBAL, LINEAR],
                    "shared_intermediate_size": 40,
                    "num_local_experts": 6,
                    "num_experts_per_tok": 2,
                }
            ),
            GraniteMoeHybridConfig(
                **MAMBA
                | THREE_TO_ONE
                | {
                    "num_hidden_layers": 3,
                    "layer_types": [LINEAR, LINEAR, GLOBAL],
                    "shared_intermediate_size": 72,
                    "num_local_experts": 0,
                    "mamba_n_heads": 6,
                    "mamba_n_groups": 1,
                    "mamba_d_conv": 3,
                    "mamba_conv_bias": False,
                    "position_embedding_type": "rope",
                    "tie_word_embeddings": True,
                }
            ),
        ),
    ),
    "falcon-h1": (
        FalconH1,
        (
            FalconH1Config(
                **MAMBA
                | {
                    "mamba_d_ssm": 48,
                    "mamba_n_heads": 6,
                    "mamba_d_state": 6,
                    "mlp_multipliers": [0.9, 0.6],
                    "ssm_multipliers": [0.4, 0.3, 0.5, 1.5, 0.7],
                    "ssm_in_multiplier": 1.25,
                    "ssm_out_multiplier": 0.3,
                    "key_multiplier": 0.4,
                    "attention_in_multiplier": 1.5,
                    "attention_out_multiplier": 0.9,
                    "lm_head_multiplier": 0.5,
                    "embedding_multiplier": 3.0,
                }
            ),
            FalconH1Config(
                **MAMBA
                | THREE_TO_ONE
                | {
                    "mamba_d_ssm": None,
                    "mamba_n_heads": 6,
                    "mamba_n_groups": 3,
                    "mamba_rms_norm": True,
                    "mamba_proj_bias": True,
                    "projectors_bias": True,
                    "mlp_bias": True,
                    "attention_bias": True,
                }
            ),
        ),
    ),
    "kimi-linear": (
        KimiLinear,
        (
            KimiLinearConfig(
                **KIMI | {"num_hidden_layers": 3, "layer_types": [LINEAR, GLOBAL, LINEAR]}
            ),
            KimiLinearConfig(
                **KIMI
                | {
                    "hidden_size": 96,
                    "num_attention_heads": 6,
                    "num_key_value_heads": 6,
                    "num_hidden_layers": 2,
                    "layer_types": [GLOBAL, LINEAR],
                    "mlp_layer_types": ["sparse", "dense"],
                    "q_lora_rank": 24,
                    "linear_num_heads": 5,
                    "linear_head_dim": 6,
                    "linear_conv_kernel_dim": 3,
                    "n_group": 4,
                    "topk_group": 2,
                    "norm_topk_prob": False,
                    "attention_bias": True,
                }
            ),
        ),
    ),
    "nemotron-h": (
        NemotronH,
        (
            NemotronHConfig(**NEMOTRON | {"layers_block_type": [LINEAR, "mlp", GLOBAL, LINEAR]}),
            NemotronHConfig(
                **NEMOTRON
                | {
                    "hidden_size": 96,
                    "num_attention_heads": 3,
                    "num_key_value_heads": 1,
                    "hybrid_override_pattern": "ME*E",
                    "n_routed_experts": 6,
                    "num_experts_per_tok": 2,
                    "moe_intermediate_size": 24,
                    "moe_shared_expert_intermediate_size": 20,
                    "n_group": 2,
                    "routed_scaling_factor": 1.7,
                    "use_bias": True,
                }
            ),
        ),
    ),
}
