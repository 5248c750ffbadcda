"""Qwen3-MoE (Yang et al., 2025): Qwen3 with a mixture of experts in some layers or all."""

from __future__ import annotations

from dataclasses import replace
from typing import ClassVar

from asyncinfer.models.config import ModelConfig
from asyncinfer.models.experts import plain_layers, read_experts
from asyncinfer.models.family import Family
from asyncinfer.models.parts import MOST_WIDTH, LayerConfig
from asyncinfer.models.reader import JsonReader
from asyncinfer.models.windows import windowed

__all__ = ["Qwen3MoE"]


class Qwen3MoE(Family):
    """Qwen3 with experts, such as Qwen3-30B-A3B."""

    model_type = "qwen3_moe"
    defaults: ClassVar = {
        "num_key_value_heads": 4,
        "num_experts": 128,
        "num_experts_per_tok": 8,
        "moe_intermediate_size": 768,
    }

    def configure(self, config: JsonReader, llama: ModelConfig) -> ModelConfig:
        key = "num_local_experts" if config.has("num_local_experts") else "num_experts"
        size = config.integer("moe_intermediate_size", 1, MOST_WIDTH)
        experts = replace(
            read_experts(config, llama, key, size),
            normalise=config.boolean("norm_topk_prob", False),
        )
        layers = self.windows(config, llama)
        llama = replace(llama, qk_norm="head", experts=experts, layers=layers)
        plain = plain_layers(config, llama.num_layers)
        if not plain:
            return llama
        layers = tuple(
            replace(llama.layer(layer), experts=layer not in plain)
            for layer in range(llama.num_layers)
        )
        return replace(llama, layers=layers)

    def windows(self, config: JsonReader, llama: ModelConfig) -> tuple[LayerConfig, ...]:
        """The layers with their windows, if they have any."""
        return windowed(config, llama) if config.boolean("use_sliding_window", False) else ()
