"""Every family in random-weight configs: what each can differ in, and odd shapes."""

from __future__ import annotations

import copy
from typing import Any

import torch
from transformers import (
    MODEL_FOR_CAUSAL_LM_MAPPING,
    AutoConfig,
    Mistral3Config,
    Mistral3ForConditionalGeneration,
    Mistral4Config,
    Mistral4ForCausalLM,
    PreTrainedConfig,
    PreTrainedModel,
)

#: What every config starts from; a family says otherwise where its keys do.
SMALL: dict[str, Any] = {
    "vocab_size": 199,
    "hidden_size": 64,
    "intermediate_size": 112,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "bos_token_id": 0,
    "eos_token_id": 1,
    "pad_token_id": 2,
}
GPT2 = {
    "vocab_size": 199,
    "n_embd": 64,
    "n_layer": 2,
    "n_head": 4,
    "n_positions": 256,
    "bos_token_id": 0,
    "eos_token_id": 1,
}
LOCAL, GLOBAL = "sliding_attention", "full_attention"
LONGROPE = {
    "rope_type": "longrope",
    "rope_theta": 10_000.0,
    "short_factor": [1.0 + 0.05 * i for i in range(6)],
    "long_factor": [1.0 + 0.5 * i for i in range(6)],
    "original_max_position_embeddings": 256,
    "partial_rotary_factor": 0.75,
}
MULTIPLIERS = {
    "embedding_multiplier": 3.0,
    "attention_multiplier": 0.2,
    "residual_multiplier": 0.4,
    "logits_scaling": 0.5,
}
SEVEN_TO_ONE = {"hidden_size": 112, "num_attention_heads": 14, "num_key_value_heads": 2}
THREE_TO_ONE = {"hidden_size": 96, "num_attention_heads": 6, "num_key_value_heads": 2}

DEEPSEEK: dict[str, Any] = {
    "num_key_value_heads": 4,
    "num_hidden_layers": 3,
    "q_lora_rank": 24,
    "kv_lora_rank": 32,
    "qk_nope_head_dim": 20,
    "qk_rope_head_dim": 8,
    "v_head_dim": 12,
    "n_routed_experts": 8,
    "num_experts_per_tok": 3,
    "moe_intermediate_size": 24,
    "n_shared_experts": 1,
    "first_k_dense_replace": 1,
}
LATENT: dict[str, Any] = {
    key: value
    for key, value in DEEPSEEK.items()
    if "expert" not in key and key not in ("moe_intermediate_size", "first_k_dense_replace")
}

#: Queries that grow with their position, as Mistral's models have them.
TEMPERED: dict[str, Any] = {
    "rope_type": "yarn",
    "rope_theta": 10_000.0,
    "factor": 16.0,
    "original_max_position_embeddings": 16,
    "mscale": 1.0,
    "mscale_all_dim": 1.0,
    "llama_4_scaling_beta": 0.3,
}
MISTRAL4: dict[str, Any] = {**DEEPSEEK, "num_hidden_layers": 2, "first_k_dense_replace": 0}
GLM_MOE: dict[str, Any] = {
    "n_routed_experts": 8,
    "num_experts_per_tok": 3,
    "moe_intermediate_size": 24,
    "num_hidden_layers": 3,
}
EXAONE_MOE: dict[str, Any] = {
    "num_experts": 8,
    "num_experts_per_tok": 3,
    "moe_intermediate_size": 24,
}
AFMOE: dict[str, Any] = {**EXAONE_MOE, "head_dim": 24, "num_shared_experts": 1}
ERNIE_MOE: dict[str, Any] = {
    "moe_num_experts": 6,
    "moe_k": 2,
    "moe_intermediate_size": 24,
    "num_hidden_layers": 3,
}

#: transformers' name of the family -> kinds -> what of the config is changed.
FAMILIES: dict[str, dict[str, dict[str, Any]]] = {
    "llama": {
        "plain": {},
        "tied, llama3": {
            "tie_word_embeddings": True,
            **SEVEN_TO_ONE,
            "rope_parameters": {
                "rope_type": "llama3",
                "rope_theta": 500_000.0,
                "factor": 8.0,
                "low_freq_factor": 1.0,
                "high_freq_factor": 4.0,
                "original_max_position_embeddings": 64,
            },
        },
    },
    "mistral": {
        "window": {"sliding_window": 24, "head_dim": 16},
        "no window": {"sliding_window": None, "head_dim": 80, "num_key_value_heads": 1},
        "window of a block": {"sliding_window": 16, **SEVEN_TO_ONE, "head_dim": 64},
    },
    "ministral": {
        "windows": {"sliding_window": 24, "layer_types": [LOCAL, GLOBAL], "head_dim": 24},
        "all windows, tied": {
            **SEVEN_TO_ONE,
            "sliding_window": 17,
            "head_dim": 16,
            "tie_word_embeddings": True,
        },
    },
    "ministral3": {
        "plain": {"head_dim": 24, "rope_parameters": TEMPERED},
        "window, tied": {
            **SEVEN_TO_ONE,
            "head_dim": 16,
            "sliding_window": 17,
            "rope_parameters": {**TEMPERED, "mscale": 0.7, "llama_4_scaling_beta": 0.8},
            "tie_word_embeddings": True,
        },
    },
    "mistral4": {
        "plain": {**MISTRAL4, "rope_parameters": TEMPERED},
        "groups, a dense layer, queries whole": {
            **MISTRAL4,
            "hidden_size": 96,
            "num_attention_heads": 6,
            "num_key_value_heads": 6,
            "q_lora_rank": None,
            "n_group": 4,
            "topk_group": 2,
            "norm_topk_prob": False,
            "routed_scaling_factor": 1.5,
            "first_k_dense_replace": 1,
            "rope_interleave": False,
            "attention_bias": True,
            "rope_parameters": {**TEMPERED, "mscale_all_dim": 0.8},
        },
    },
    "qwen2": {
        "plain": {},
        "tied": {"tie_word_embeddings": True, **SEVEN_TO_ONE},
        "window above": {
            "use_sliding_window": True,
            "sliding_window": 20,
            "max_window_layers": 1,
            "num_hidden_layers": 3,
        },
    },
    "qwen3": {
        "plain": {"head_dim": 128},
        "tied": {"head_dim": 16, "tie_word_embeddings": True, **THREE_TO_ONE},
        "bias and windows": {
            "head_dim": 96,
            "attention_bias": True,
            "use_sliding_window": True,
            "sliding_window": 31,
            "max_window_layers": 1,
        },
    },
    "smollm3": {
        "plain": {"num_hidden_layers": 4},
        "every other": {"no_rope_layer_interval": 2, **SEVEN_TO_ONE},
        "listed, untied, windows": {
            "no_rope_layers": [0, 1, 0],
            "num_hidden_layers": 3,
            "use_sliding_window": True,
            "sliding_window": 18,
            "tie_word_embeddings": False,
        },
    },
    "granite": {
        "multipliers": MULTIPLIERS,
        "biases, tied": {
            **MULTIPLIERS,
            **THREE_TO_ONE,
            "attention_bias": True,
            "mlp_bias": True,
            "tie_word_embeddings": True,
        },
    },
    "olmo2": {
        "plain": {},
        "biases": {**SEVEN_TO_ONE, "attention_bias": True, "tie_word_embeddings": True},
    },
    "olmo3": {
        "plain": {"sliding_window": 24, "num_hidden_layers": 4},
        "listed, yarn": {
            **SEVEN_TO_ONE,
            "sliding_window": 17,
            "layer_types": [GLOBAL, LOCAL],
            "attention_bias": True,
            "rope_parameters": {
                GLOBAL: {
                    "rope_type": "yarn",
                    "rope_theta": 500_000.0,
                    "factor": 4.0,
                    "original_max_position_embeddings": 64,
                },
                LOCAL: {"rope_type": "default", "rope_theta": 500_000.0},
            },
        },
    },
    "olmoe": {
        "plain": {"num_experts": 6, "num_experts_per_tok": 3},
        "normalised, tied": {
            **SEVEN_TO_ONE,
            "num_experts": 5,
            "num_experts_per_tok": 2,
            "norm_topk_prob": True,
            "attention_bias": True,
            "tie_word_embeddings": True,
        },
    },
    "seed_oss": {
        "plain": {"head_dim": 24},
        "biases, tied": {
            **SEVEN_TO_ONE,
            "head_dim": 16,
            "attention_out_bias": True,
            "mlp_bias": True,
            "tie_word_embeddings": True,
        },
    },
    "arcee": {
        "plain": {},
        "biases, tied": {
            **THREE_TO_ONE,
            "attention_bias": True,
            "mlp_bias": True,
            "tie_word_embeddings": True,
        },
    },
    "nemotron": {
        "plain": {},
        "biases, tied": {
            **THREE_TO_ONE,
            "attention_bias": True,
            "mlp_bias": True,
            "tie_word_embeddings": True,
        },
    },
    "afmoe": {
        "plain": {**AFMOE, "num_hidden_layers": 5, "sliding_window": 24},
        "listed, scaled, tied": {
            **AFMOE,
            **SEVEN_TO_ONE,
            "head_dim": 16,
            "num_hidden_layers": 3,
            "num_dense_layers": 0,
            "layer_types": [LOCAL, GLOBAL, LOCAL],
            "sliding_window": 17,
            "num_shared_experts": 2,
            "route_scale": 1.5,
            "mup_enabled": True,
            "tie_word_embeddings": True,
        },
    },
    "apertus": {
        "plain": {},
        "biases, tied": {**THREE_TO_ONE, "attention_bias": True, "tie_word_embeddings": True},
    },
    "ernie4_5": {
        "plain": {"head_dim": 24},
        "biases, untied": {
            **SEVEN_TO_ONE,
            "head_dim": 16,
            "use_bias": True,
            "tie_word_embeddings": False,
        },
    },
    "ernie4_5_moe": {
        "plain": ERNIE_MOE,
        "some layers, biases, untied": {
            **ERNIE_MOE,
            **SEVEN_TO_ONE,
            "num_hidden_layers": 5,
            "moe_layer_interval": 2,
            "moe_layer_end_index": 3,
            "moe_num_shared_experts": 0,
            "use_bias": True,
            "tie_word_embeddings": False,
        },
    },
    "glm4_moe": {
        "plain": {**GLM_MOE, "head_dim": 24},
        "norms, groups, biases": {
            **GLM_MOE,
            **SEVEN_TO_ONE,
            "head_dim": 16,
            "use_qk_norm": True,
            "n_group": 4,
            "topk_group": 2,
            "routed_scaling_factor": 1.5,
            "norm_topk_prob": False,
            "attention_bias": True,
            "first_k_dense_replace": 0,
        },
    },
    "glm4_moe_lite": {
        "plain": DEEPSEEK,
        "groups, queries whole": {
            **DEEPSEEK,
            "num_hidden_layers": 2,
            "q_lora_rank": None,
            "n_group": 4,
            "topk_group": 2,
            "norm_topk_prob": False,
            "mlp_layer_types": ["sparse", "dense"],
        },
    },
    "granite_swa": {
        "plain": {**MULTIPLIERS, "num_hidden_layers": 5, "sliding_window": 24},
        "listed, bases of their own, untied": {
            **MULTIPLIERS,
            **THREE_TO_ONE,
            "num_hidden_layers": 3,
            "layer_types": [LOCAL, GLOBAL, LOCAL],
            "layer_rope_theta": [10_000.0, 0, 500_000.0],
            "sliding_window": 17,
            "attention_bias": True,
            "mlp_bias": True,
            "tie_word_embeddings": False,
        },
    },
    "youtu": {
        "plain": LATENT,
        "queries whole, untied": {
            **LATENT,
            "num_hidden_layers": 2,
            "q_lora_rank": None,
            "attention_bias": True,
            "rope_interleave": False,
            "tie_word_embeddings": False,
        },
    },
    "hy_v3": {
        "plain": {**EXAONE_MOE, "head_dim": 24},
        "listed, two shared, tied": {
            **EXAONE_MOE,
            **SEVEN_TO_ONE,
            "head_dim": 16,
            "num_hidden_layers": 3,
            "mlp_layer_types": ["sparse", "dense", "sparse"],
            "num_shared_experts": 2,
            "router_scaling_factor": 1.5,
            "attention_bias": True,
            "tie_word_embeddings": True,
        },
    },
    "dots1": {
        "plain": {**GLM_MOE, "n_shared_experts": 2, "first_k_dense_replace": 1, "head_dim": 24},
        "groups, windows, biases": {
            **GLM_MOE,
            **SEVEN_TO_ONE,
            "head_dim": 16,
            "n_shared_experts": 1,
            "n_group": 4,
            "topk_group": 2,
            "routed_scaling_factor": 1.5,
            "norm_topk_prob": True,
            "sliding_window": 17,
            "max_window_layers": 1,
            "attention_bias": True,
            "tie_word_embeddings": True,
        },
    },
    "solar_open": {
        "plain": {**GLM_MOE, "head_dim": 24},
        "groups, biases": {
            **GLM_MOE,
            **SEVEN_TO_ONE,
            "head_dim": 16,
            "n_group": 4,
            "topk_group": 2,
            "routed_scaling_factor": 1.5,
            "norm_topk_prob": False,
            "attention_bias": True,
        },
    },
    "exaone_moe": {
        "plain": {**EXAONE_MOE, "sliding_window": 24, "num_hidden_layers": 4},
        "all with experts, groups": {
            **EXAONE_MOE,
            **SEVEN_TO_ONE,
            "sliding_window": 17,
            "layer_types": [GLOBAL, LOCAL],
            "mlp_layer_types": ["sparse", "sparse"],
            "n_group": 4,
            "topk_group": 2,
            "norm_topk_prob": False,
            "num_shared_experts": 2,
        },
    },
    "cwm": {
        "plain": {"sliding_window": 24, "num_hidden_layers": 5, "head_dim": 24},
        "listed, tied": {
            **SEVEN_TO_ONE,
            "head_dim": 16,
            "sliding_window": 17,
            "layer_types": [LOCAL, GLOBAL],
            "rope_parameters": {"rope_type": "default", "rope_theta": 10_000.0},
            "tie_word_embeddings": True,
        },
    },
    "gemma": {
        "plain": {"head_dim": 24, "tie_word_embeddings": False},
        "multi-query, biases, tied": {
            **THREE_TO_ONE,
            "num_key_value_heads": 1,
            "head_dim": 16,
            "attention_bias": True,
        },
    },
    "glm4": {
        "plain": {"head_dim": 16},
        "no biases, tied": {
            **THREE_TO_ONE,
            "head_dim": 24,
            "attention_bias": False,
            "tie_word_embeddings": True,
        },
    },
    "exaone4": {
        "plain": {"sliding_window": 24, "num_hidden_layers": 4},
        "no windows, tied": {
            **THREE_TO_ONE,
            "head_dim": 24,
            "sliding_window": None,
            "layer_types": [GLOBAL, GLOBAL],
            "tie_word_embeddings": True,
        },
    },
    "cohere2": {
        "plain": {"sliding_window": 24, "num_hidden_layers": 4, "logit_scale": 0.7},
        "biases, untied": {
            **THREE_TO_ONE,
            "sliding_window": 17,
            "layer_types": [GLOBAL, LOCAL],
            "attention_bias": True,
            "logit_scale": 0.5,
            "tie_word_embeddings": False,
        },
    },
    "hunyuan_v1_dense": {
        "plain": {"head_dim": 24},
        "stretched, biases, tied": {
            **SEVEN_TO_ONE,
            "head_dim": 16,
            "attention_bias": True,
            "tie_word_embeddings": True,
            "rope_parameters": {
                "rope_type": "dynamic",
                "rope_theta": 10_000.0,
                "factor": 1.0,
                "alpha": 50.0,
            },
        },
    },
    "hunyuan_v1_moe": {
        "plain": {"head_dim": 24, "num_experts": 6, "moe_topk": 2},
        "stretched, biases, by layer": {
            **SEVEN_TO_ONE,
            "head_dim": 16,
            "num_experts": 5,
            "moe_topk": [3, 3],
            "attention_bias": True,
            "rope_parameters": {
                "rope_type": "dynamic",
                "rope_theta": 10_000.0,
                "factor": 1.0,
                "alpha": 50.0,
            },
        },
    },
    "starcoder2": {
        "window": {"sliding_window": 24},
        "no bias": {"use_bias": False, "tie_word_embeddings": False, **THREE_TO_ONE},
        "multi-query": {"num_key_value_heads": 1, "hidden_size": 160, "num_attention_heads": 2},
    },
    "phi3": {
        "plain": {},
        "window": {"sliding_window": 24, **THREE_TO_ONE},
        "longrope": {
            "rope_parameters": LONGROPE,
            "max_position_embeddings": 1024,
            "original_max_position_embeddings": 256,
            "tie_word_embeddings": True,
        },
    },
    "phimoe": {
        "plain": {"num_local_experts": 6},
        "longrope, biases": {
            **THREE_TO_ONE,
            "num_local_experts": 5,
            "router_jitter_noise": 0.2,
            "attention_bias": True,
            "lm_head_bias": True,
            "max_position_embeddings": 1024,
            "rope_parameters": {
                "rope_type": "longrope",
                "rope_theta": 10_000.0,
                "short_factor": [1.0 + 0.05 * i for i in range(8)],
                "long_factor": [1.0 + 0.5 * i for i in range(8)],
                "original_max_position_embeddings": 256,
                "short_mscale": 1.2,
                "long_mscale": 1.2,
            },
        },
    },
    "phi": {
        "plain": {"num_key_value_heads": 4},
        "grouped": {**THREE_TO_ONE, "rope_parameters": {"partial_rotary_factor": 0.25}},
        "all rotated": {"rope_parameters": {"partial_rotary_factor": 1.0}, "hidden_act": "gelu"},
    },
    "gpt_neox": {
        "plain": {"num_key_value_heads": None},
        "one after the other": {"use_parallel_residual": False, "num_key_value_heads": None},
        "no bias, tied": {
            "attention_bias": False,
            "tie_word_embeddings": True,
            "num_key_value_heads": None,
            "hidden_size": 128,
            "num_attention_heads": 2,
        },
    },
    "gpt2": {
        "plain": {},
        "untied, wide": {"tie_word_embeddings": False, "n_inner": 96, "n_embd": 160, "n_head": 2},
        "unscaled": {"scale_attn_weights": False, "n_embd": 48, "n_head": 6},
    },
    "gemma2": {
        "plain": {"head_dim": 256, "sliding_window": 24, "query_pre_attn_scalar": 64},
        "caps": {
            "head_dim": 16,
            "sliding_window": 20,
            "query_pre_attn_scalar": 8,
            "attn_logit_softcapping": 3.0,
            "final_logit_softcapping": 5.0,
            "attention_bias": True,
        },
        "no caps, untied": {
            "head_dim": 80,
            "sliding_window": 33,
            "attn_logit_softcapping": None,
            "final_logit_softcapping": None,
            "tie_word_embeddings": False,
            **THREE_TO_ONE,
        },
    },
    "gemma3_text": {
        "plain": {"head_dim": 64, "sliding_window": 24, "num_hidden_layers": 7},
        "listed": {
            "head_dim": 96,
            "sliding_window": 17,
            "num_hidden_layers": 3,
            "layer_types": [GLOBAL, LOCAL, LOCAL],
            "num_key_value_heads": 1,
            "query_pre_attn_scalar": 48,
        },
        "scaled": {
            "head_dim": 128,
            "sliding_window": 40,
            "layer_types": [LOCAL, GLOBAL],
            "tie_word_embeddings": False,
            "final_logit_softcapping": 6.0,
            "rope_parameters": {
                GLOBAL: {"rope_type": "linear", "factor": 8.0, "rope_theta": 1_000_000.0},
                LOCAL: {"rope_type": "default", "rope_theta": 5_000.0},
            },
        },
    },
    "mixtral": {
        "plain": {"num_local_experts": 4, "head_dim": 16},
        "window, one of three": {
            "num_local_experts": 3,
            "num_experts_per_tok": 1,
            "sliding_window": 24,
            **SEVEN_TO_ONE,
        },
    },
    "granitemoe": {
        "plain": {**MULTIPLIERS, "num_local_experts": 6, "num_experts_per_tok": 3},
        "biases, tied": {
            **MULTIPLIERS,
            **THREE_TO_ONE,
            "num_local_experts": 5,
            "attention_bias": True,
            "tie_word_embeddings": True,
        },
    },
    "minimax_m2": {
        "plain": {"num_local_experts": 6, "num_experts_per_tok": 3, "head_dim": 16},
        "half rotated, tied": {
            **SEVEN_TO_ONE,
            "num_local_experts": 5,
            "num_experts_per_tok": 2,
            "head_dim": 24,
            "rotary_dim": 12,
            "tie_word_embeddings": True,
        },
    },
    "qwen2_moe": {
        "plain": {
            "num_experts": 6,
            "num_experts_per_tok": 3,
            "moe_intermediate_size": 24,
            "shared_expert_intermediate_size": 48,
        },
        "some layers, normalised, windows": {
            "num_experts": 5,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 40,
            "shared_expert_intermediate_size": 32,
            "norm_topk_prob": True,
            "decoder_sparse_step": 2,
            "mlp_only_layers": [3],
            "num_hidden_layers": 4,
            "use_sliding_window": True,
            "sliding_window": 20,
            "max_window_layers": 2,
            "qkv_bias": False,
            "tie_word_embeddings": True,
        },
    },
    "qwen3_moe": {
        "plain": {"num_experts": 6, "num_experts_per_tok": 3, "moe_intermediate_size": 48},
        "some layers, normalised": {
            "num_experts": 5,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 40,
            "norm_topk_prob": True,
            "decoder_sparse_step": 2,
            "mlp_only_layers": [3],
            "num_hidden_layers": 4,
            "tie_word_embeddings": True,
        },
        "windows": {
            "num_experts": 4,
            "num_experts_per_tok": 4,
            "moe_intermediate_size": 64,
            "use_sliding_window": True,
            "sliding_window": 20,
            "attention_bias": True,
            "head_dim": 80,
        },
    },
    "gpt_oss": {
        "plain": {"num_local_experts": 4, "num_experts_per_tok": 2, "sliding_window": 24},
        "listed, unscaled": {
            "num_local_experts": 5,
            "num_experts_per_tok": 3,
            "sliding_window": 17,
            "layer_types": [GLOBAL, LOCAL, LOCAL],
            "num_hidden_layers": 3,
            "attention_bias": False,
            "swiglu_limit": 0.7,
            "head_dim": 16,
            "rope_parameters": {"rope_type": "default", "rope_theta": 5_000.0},
        },
    },
    "deepseek_v3": {
        "plain": {**DEEPSEEK, "n_group": 2, "topk_group": 1},
        "yarn, queries whole": {
            **DEEPSEEK,
            "q_lora_rank": None,
            "n_group": 4,
            "topk_group": 2,
            "norm_topk_prob": False,
            "first_k_dense_replace": 0,
            "attention_bias": True,
            "rope_parameters": {
                "rope_type": "yarn",
                "rope_theta": 10_000.0,
                "factor": 4.0,
                "mscale": 0.8,
                "mscale_all_dim": 1.0,
                "original_max_position_embeddings": 64,
            },
        },
        "not interleaved": {**DEEPSEEK, "n_group": 1, "topk_group": 1, "rope_interleave": False},
    },
    "deepseek_v2": {
        "plain": {**DEEPSEEK, "q_lora_rank": None, "routed_scaling_factor": 1.5},
        "groups": {
            **DEEPSEEK,
            "topk_method": "group_limited_greedy",
            "n_group": 4,
            "topk_group": 2,
            "first_k_dense_replace": 0,
            "tie_word_embeddings": True,
            "n_shared_experts": 2,
        },
    },
}
#: What transformers does not list among models of text.
UNLISTED: dict[type[PreTrainedConfig], Any] = {
    Mistral3Config: Mistral3ForConditionalGeneration,
    Mistral4Config: Mistral4ForCausalLM,
}
CASES = [(family, kind) for family, kinds in FAMILIES.items() for kind in kinds]


def config_of(family: str, kind: str, **changes: Any) -> PreTrainedConfig:
    base = GPT2 if family == "gpt2" else SMALL
    # A config of transformers may write into what it is given.
    values = copy.deepcopy({**base, **FAMILIES[family][kind], **changes})
    return AutoConfig.for_model(family, **values)


def random_model(family: str, kind: str, **changes: Any) -> PreTrainedModel:
    """A transformers model with weights large enough that every part of it shows in the logits."""
    return randomised(config_of(family, kind, **changes))


def causal_class(config: PreTrainedConfig) -> Any:
    """The class of transformers for the config's text model."""
    return UNLISTED.get(type(config)) or MODEL_FOR_CAUSAL_LM_MAPPING[type(config)]


def randomised(config: PreTrainedConfig) -> PreTrainedModel:
    """The config's model with random weights. Norms' weights are near one, whatever their form."""
    model = causal_class(config)._from_config(config, attn_implementation="eager").eval()
    generator = torch.Generator().manual_seed(7)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.normal_(0.0, 0.15, generator=generator)
            norm = "norm" in name or ".ln_" in name
            plus_one = config.model_type in ("gemma", "gemma2", "gemma3_text")
            if norm and name.endswith("weight") and not plus_one:
                parameter.add_(1.0)
        for name, buffer in model.named_buffers():
            if name.endswith("e_score_correction_bias"):
                buffer.normal_(0.0, 0.1, generator=generator)
            if name.endswith("layer_scalar"):
                buffer.uniform_(0.5, 1.5, generator=generator)
    return model
