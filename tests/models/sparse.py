"""Small models with random weights, whose tokens attend to a part of those before them: to those of
their chunk, or to those that an indexer chooses."""

from __future__ import annotations

from typing import Any

from models.families import DEEPSEEK, SEVEN_TO_ONE, SMALL
from transformers import (
    DeepseekV32Config,
    GlmMoeDsaConfig,
    Llama4TextConfig,
    PreTrainedConfig,
)

from asyncinfer.models import Family
from asyncinfer.models.deepseek_v32 import DeepSeekV32
from asyncinfer.models.glm_moe_dsa import GLM5
from asyncinfer.models.llama4 import Llama4

LLAMA4: dict[str, Any] = {
    **SMALL,
    "head_dim": 16,
    "intermediate_size": 24,
    "intermediate_size_mlp": 56,
    "num_local_experts": 5,
    "floor_scale": 7,
    "rope_parameters": {"rope_type": "default", "rope_theta": 10_000.0},
}
#: With fewer heads many tokens have a score of zero, and which of them are chosen nobody says.
INDEXED: dict[str, Any] = {
    **SMALL,
    **DEEPSEEK,
    "index_n_heads": 17,
    "index_head_dim": 18,
    "index_topk": 12,
}

#: As in `HYBRIDS`.
SPARSE: dict[str, tuple[type[Family], tuple[PreTrainedConfig, ...]]] = {
    "llama4": (
        Llama4,
        (
            Llama4TextConfig(
                **LLAMA4
                | {
                    "num_hidden_layers": 4,
                    "attention_chunk_size": 32,
                    "interleave_moe_layer_step": 2,
                    "num_experts_per_tok": 2,
                }
            ),
            Llama4TextConfig(
                **LLAMA4
                | SEVEN_TO_ONE
                | {
                    "num_hidden_layers": 3,
                    "attention_chunk_size": 16,
                    "no_rope_layers": [1, 0, 1],
                    "use_qk_norm": False,
                    "num_experts_per_tok": 1,
                    "attention_bias": True,
                    "tie_word_embeddings": True,
                }
            ),
        ),
    ),
    "glm-5": (
        GLM5,
        (
            GlmMoeDsaConfig(**INDEXED),
            GlmMoeDsaConfig(
                **INDEXED
                | {
                    "num_hidden_layers": 2,
                    "index_n_heads": 19,
                    "index_topk": 31,
                    "n_group": 4,
                    "topk_group": 2,
                    "norm_topk_prob": False,
                    "mlp_layer_types": ["sparse", "dense"],
                }
            ),
        ),
    ),
    "deepseek-v3.2": (
        DeepSeekV32,
        (
            DeepseekV32Config(**INDEXED | {"n_group": 2, "topk_group": 1}),
            DeepseekV32Config(
                **INDEXED
                | {
                    "num_hidden_layers": 2,
                    "index_n_heads": 19,
                    "index_topk": 31,
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
                }
            ),
        ),
    ),
}
