"""AFMoE (Arcee AI, 2025): a gate of attention's output, three windowed layers for each global one,
which has no rotation, sandwich norms, and experts by sigmoid."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import ClassVar

from asyncinfer.models.config import ModelConfig
from asyncinfer.models.experts import dense_first, read_grouped_experts, with_experts
from asyncinfer.models.family import Family
from asyncinfer.models.names import TensorNames
from asyncinfer.models.reader import JsonReader
from asyncinfer.models.windows import sliding_layers, windowed

__all__ = ["AFMoE"]


class AFMoE(Family):
    """Trinity Nano, Mini and Large: a gate, windows, experts by sigmoid, shared ones."""

    model_type = "afmoe"
    keys: ClassVar = {
        "n_routed_experts": "num_experts",
        "n_shared_experts": "num_shared_experts",
        "routed_scaling_factor": "route_scale",
        "norm_topk_prob": "route_norm",
        "first_k_dense_replace": "num_dense_layers",
    }
    defaults: ClassVar = {
        "head_dim": 128,
        "rms_norm_eps": 1e-5,
        "sliding_window": 1024,
        "global_attn_every_n_layers": 4,
        "num_experts": 64,
        "num_experts_per_tok": 6,
        "num_shared_experts": 2,
        "num_dense_layers": 1,
        "moe_intermediate_size": 1408,
        "route_scale": 1.0,
        "route_norm": True,
        "n_group": 1,
        "topk_group": 1,
    }

    def configure(self, config: JsonReader, llama: ModelConfig) -> ModelConfig:
        for key in ("attention_bias", "mlp_bias"):
            if config.boolean(key, False):
                raise config.refuse(key, "is not supported")
        if config.string("score_func", "sigmoid") != "sigmoid":
            raise config.refuse("score_func", "must be sigmoid")
        every = config.integer("global_attn_every_n_layers", 1, 1 << 10)
        slides = sliding_layers(config, llama, lambda layer: (layer + 1) % every != 0)
        scaled = config.boolean("mup_enabled", False)
        base = replace(
            llama,
            block="sandwich",
            qk_norm="head",
            attention_gate=True,
            embedding_scale=math.sqrt(llama.hidden_size) if scaled else 1.0,
            experts=read_grouped_experts(config, llama),
            layers=windowed(config, replace(llama, rope=None), slides, llama.rope),
            names=TensorNames(
                qkv=tuple(f"self_attn.{part}_proj" for part in ("gate", "q", "k", "v")),
                attention_out_norm="post_attention_layernorm",
                mlp_norm="pre_mlp_layernorm",
                mlp_out_norm="post_mlp_layernorm",
                router="mlp.router.gate",
                correction="mlp.expert_bias",
            ),
        )
        return with_experts(base, dense_first(config, base.num_layers, None))
