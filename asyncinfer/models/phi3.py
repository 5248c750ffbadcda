"""Phi-3 and Phi-4-mini (Abdin et al., 2024): Llama with fused projections."""

from __future__ import annotations

from dataclasses import replace
from typing import ClassVar

from asyncinfer.models.config import ModelConfig
from asyncinfer.models.family import Family
from asyncinfer.models.names import TensorNames
from asyncinfer.models.reader import JsonReader
from asyncinfer.models.windows import windowed

__all__ = ["Phi3"]


class Phi3(Family):
    """Phi-3, Phi-3.5-mini, Phi-4 and Phi-4-mini: fused projections, partial rotary, LongRoPE."""

    model_type = "phi3"
    defaults: ClassVar = {"rms_norm_eps": 1e-5, "original_max_position_embeddings": 4096}
    partial_rotary = True

    def configure(self, config: JsonReader, llama: ModelConfig) -> ModelConfig:
        names = TensorNames(qkv=("self_attn.qkv_proj",), up=("mlp.gate_up_proj",))
        return replace(llama, layers=windowed(config, llama), names=names)
