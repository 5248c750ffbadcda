"""Qwen3.5 (Qwen team, 2026), dense: gated delta nets in most layers, attention with a gate in the
others."""

from __future__ import annotations

from dataclasses import replace
from typing import ClassVar

from asyncinfer.models.config import ModelConfig
from asyncinfer.models.delta_nets import DELTA_DEFAULTS, with_delta_nets
from asyncinfer.models.family import Family
from asyncinfer.models.reader import JsonReader

__all__ = ["Qwen35"]


class Qwen35(Family):
    """Qwen3.5's text model."""

    model_type = "qwen3_5_text"
    partial_rotary = True
    defaults: ClassVar = {
        **DELTA_DEFAULTS,
        "vocab_size": 248_320,
        "num_key_value_heads": 4,
    }

    def configure(self, config: JsonReader, llama: ModelConfig) -> ModelConfig:
        base = with_delta_nets(config, llama)
        names = replace(
            base.names,
            delta_in=("linear_attn.in_proj_qkv", "linear_attn.in_proj_z"),
            delta_gates=("linear_attn.in_proj_b", "linear_attn.in_proj_a"),
        )
        return replace(base, names=names)
