"""Qwen3-MoE (Yang et al., 2025): Qwen3 with a mixture of experts in some layers or all."""

from __future__ import annotations

from dataclasses import replace
from typing import ClassVar

from asyncinfer.models.config import ModelConfig
from asyncinfer.models.experts import read_experts
from asyncinfer.models.family import Family
from asyncinfer.models.reader import JsonReader
from asyncinfer.models.windows import windowed

__all__ = ["Qwen3MoE"]

_MOST_WIDTH = 1 << 20


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
        size = config.integer("moe_intermediate_size", 1, _MOST_WIDTH)
        experts = replace(
            read_experts(config, llama, key, size),
            normalise=config.boolean("norm_topk_prob", False),
        )
        llama = replace(llama, qk_norm="head", experts=experts)
        if config.boolean("use_sliding_window", False):
            llama = replace(llama, layers=windowed(config, llama))
        plain = self._plain_layers(config, llama.num_layers)
        if not plain:
            return llama
        layers = (
            replace(llama.layer(layer), experts=layer not in plain)
            for layer in range(llama.num_layers)
        )
        return replace(llama, layers=tuple(layers))

    def _plain_layers(self, config: JsonReader, layers: int) -> set[int]:
        """Those without experts."""
        every = config.integer("decoder_sparse_step", 1, 1 << 10, 1)
        plain = {layer for layer in range(layers) if (layer + 1) % every}
        if config.has("mlp_only_layers"):
            plain |= set(config.integers("mlp_only_layers", None, 0, layers - 1))
        return plain
