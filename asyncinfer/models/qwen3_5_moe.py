"""Qwen3.5 with experts (Qwen team, 2026)."""

from __future__ import annotations

from dataclasses import replace
from typing import ClassVar

from asyncinfer.models.config import ModelConfig
from asyncinfer.models.qwen3_5 import Qwen35
from asyncinfer.models.qwen3_next import gated_experts
from asyncinfer.models.reader import JsonReader

__all__ = ["Qwen35MoE"]


class Qwen35MoE(Qwen35):
    """Qwen3.5 with experts, its text model."""

    model_type = "qwen3_5_moe_text"
    defaults: ClassVar = {
        **Qwen35.defaults,
        "num_key_value_heads": 2,
        # No layer is without experts, and the key is left out.
        "intermediate_size": 512,
        "moe_intermediate_size": 512,
        "shared_expert_intermediate_size": 512,
        "num_experts": 256,
        "num_experts_per_tok": 8,
    }

    def configure(self, config: JsonReader, llama: ModelConfig) -> ModelConfig:
        base = super().configure(config, llama)
        names = replace(
            base.names, fused_experts=("mlp.experts.gate_up_proj", "mlp.experts.down_proj")
        )
        return replace(base, experts=gated_experts(config, llama), names=names)
