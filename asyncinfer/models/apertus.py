"""Apertus (Swiss AI, 2025): xIELU, an activation with weights, and norms of queries and keys."""

from __future__ import annotations

from dataclasses import replace
from typing import ClassVar

from asyncinfer.models.config import ModelConfig
from asyncinfer.models.family import Family
from asyncinfer.models.names import TensorNames
from asyncinfer.models.reader import JsonReader

__all__ = ["Apertus"]


class Apertus(Family):
    """Apertus, such as Apertus-8B-Instruct-2509: xIELU without a gate, norms of heads."""

    model_type = "apertus"
    defaults: ClassVar = {
        "rms_norm_eps": 1e-5,
        "hidden_act": "xielu",
        "rope_theta": 12_000_000.0,
        "rope_parameters": {
            "rope_type": "llama3",
            "factor": 8.0,
            "original_max_position_embeddings": 8192,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
        },
    }

    def configure(self, config: JsonReader, llama: ModelConfig) -> ModelConfig:
        return replace(
            llama,
            qk_norm="head",
            gated_mlp=False,
            mlp_bias=False,
            names=TensorNames(
                attention_norm="attention_layernorm",
                mlp_norm="feedforward_layernorm",
                up=("mlp.up_proj",),
            ),
        )
