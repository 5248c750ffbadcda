"""Qwen3-Next (Qwen team, 2025): gated delta nets in most layers, attention with a gate in the
others, experts in all."""

from __future__ import annotations

from dataclasses import replace
from typing import ClassVar

from asyncinfer.models.config import ModelConfig
from asyncinfer.models.delta_nets import DELTA_DEFAULTS, with_delta_nets
from asyncinfer.models.experts import plain_layers, read_experts
from asyncinfer.models.family import Family
from asyncinfer.models.parts import MOST_WIDTH, ExpertsConfig
from asyncinfer.models.reader import JsonReader

__all__ = ["Qwen3Next", "gated_experts"]


class Qwen3Next(Family):
    """Qwen3-Next, such as Qwen3-Next-80B-A3B."""

    model_type = "qwen3_next"
    partial_rotary = True
    defaults: ClassVar = {
        **DELTA_DEFAULTS,
        "num_key_value_heads": 2,
        "num_experts": 512,
        "num_experts_per_tok": 10,
        "moe_intermediate_size": 512,
        "shared_expert_intermediate_size": 512,
    }

    def configure(self, config: JsonReader, llama: ModelConfig) -> ModelConfig:
        base = with_delta_nets(config, llama)
        experts = replace(
            gated_experts(config, llama), normalise=config.boolean("norm_topk_prob", True)
        )
        plain = plain_layers(config, llama.num_layers)
        return replace(
            base,
            experts=experts,
            layers=tuple(
                replace(layer, experts=index not in plain)
                for index, layer in enumerate(base.layers)
            ),
        )


def gated_experts(config: JsonReader, llama: ModelConfig) -> ExpertsConfig:
    """The experts, one of which every token takes, times a gate."""
    size = config.integer("moe_intermediate_size", 1, MOST_WIDTH)
    return replace(
        read_experts(config, llama, "num_experts", size),
        shared_size=config.integer("shared_expert_intermediate_size", 1, MOST_WIDTH),
        shared_gate=True,
    )
