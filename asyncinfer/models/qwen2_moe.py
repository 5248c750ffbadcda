"""Qwen2-MoE (Yang et al., 2024): Qwen2 with experts, and a shared one behind a gate of its own."""

from __future__ import annotations

from dataclasses import replace
from typing import ClassVar

from asyncinfer.models.config import ModelConfig
from asyncinfer.models.parts import MOST_WIDTH, LayerConfig
from asyncinfer.models.qwen3_moe import Qwen3MoE
from asyncinfer.models.reader import JsonReader
from asyncinfer.models.windows import windowed_if_used

__all__ = ["Qwen2MoE"]


class Qwen2MoE(Qwen3MoE):
    """Qwen2 with experts, such as Qwen1.5-MoE-A2.7B and Qwen2-57B-A14B."""

    model_type = "qwen2_moe"
    keys: ClassVar = {"attention_bias": "qkv_bias"}
    defaults: ClassVar = {
        "num_key_value_heads": 16,
        "qkv_bias": True,
        "num_experts": 60,
        "num_experts_per_tok": 4,
        "moe_intermediate_size": 1408,
        "shared_expert_intermediate_size": 5632,
        "sliding_window": 4096,
        "max_window_layers": 28,
    }

    def configure(self, config: JsonReader, llama: ModelConfig) -> ModelConfig:
        base = super().configure(config, llama)
        assert base.experts is not None
        size = config.integer("shared_expert_intermediate_size", 1, MOST_WIDTH)
        return replace(
            base,
            qk_norm=None,
            out_bias=False,
            mlp_bias=False,
            experts=replace(base.experts, shared_size=size, shared_gate=True),
            names=replace(
                base.names,
                shared_up=("mlp.shared_expert.gate_proj", "mlp.shared_expert.up_proj"),
                shared_down="mlp.shared_expert.down_proj",
            ),
        )

    def windows(self, config: JsonReader, llama: ModelConfig) -> tuple[LayerConfig, ...]:
        below = config.integer("max_window_layers", 0, 1 << 10)
        return windowed_if_used(config, llama, lambda layer: layer % 2 == 0 and layer < below)
