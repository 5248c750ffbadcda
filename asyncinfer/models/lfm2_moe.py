"""LFM2 with experts (Liquid AI, 2025): all layers but the first few have a mixture of experts."""

from __future__ import annotations

from dataclasses import replace
from typing import ClassVar

from asyncinfer.models.config import ModelConfig
from asyncinfer.models.experts import read_experts
from asyncinfer.models.lfm2 import LFM2
from asyncinfer.models.parts import MOST_LAYERS, MOST_WIDTH
from asyncinfer.models.reader import JsonReader

__all__ = ["LFM2MoE"]


class LFM2MoE(LFM2):
    """LFM2 with experts, such as LFM2-8B-A1B: sigmoid scores, a bias for the choice alone."""

    model_type = "lfm2_moe"
    defaults: ClassVar = {
        **LFM2.defaults,
        "moe_intermediate_size": 1792,
        "num_dense_layers": 2,
        "num_experts": 32,
        "num_experts_per_tok": 4,
    }

    def width(self, config: JsonReader, llama: ModelConfig) -> int:
        return llama.intermediate_size

    def configure(self, config: JsonReader, llama: ModelConfig) -> ModelConfig:
        if not config.has("layer_types"):
            raise config.refuse("layer_types", "is required")
        base = super().configure(config, llama)
        size = config.integer("moe_intermediate_size", 1, MOST_WIDTH)
        dense = config.integer("num_dense_layers", 0, MOST_LAYERS)
        experts = replace(
            read_experts(config, llama, "num_experts", size),
            normalise=config.boolean("norm_topk_prob", True),
            epsilon=1e-6,
            scoring="sigmoid",
            correction=config.boolean("use_expert_bias", True),
            scale=config.number("routed_scaling_factor", 1e-6, 1e6, 1.0),
        )
        return replace(
            base,
            experts=experts,
            layers=tuple(
                replace(layer, experts=index >= dense) for index, layer in enumerate(base.layers)
            ),
            names=replace(
                base.names,
                router="feed_forward.gate",
                correction="feed_forward.expert_bias",
                expert_up=("feed_forward.experts.{}.w1", "feed_forward.experts.{}.w3"),
                expert_down="feed_forward.experts.{}.w2",
            ),
        )
