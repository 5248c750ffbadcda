"""Ministral 3 (Mistral AI, 2025): Mistral with queries that grow with their position."""

from __future__ import annotations

from dataclasses import replace
from types import MappingProxyType
from typing import ClassVar

from asyncinfer.models.config import ModelConfig
from asyncinfer.models.mistral import Mistral
from asyncinfer.models.reader import JsonReader
from asyncinfer.models.temperatures import tempered

__all__ = ["Ministral3"]


class Ministral3(Mistral):
    """Ministral 3, such as Ministral-3-8B, text."""

    model_type = "ministral3"
    defaults: ClassVar = {
        "num_key_value_heads": 8,
        "head_dim": 128,
        "rms_norm_eps": 1e-5,
        "rope_parameters": MappingProxyType(
            {
                "rope_type": "yarn",
                "rope_theta": 1_000_000.0,
                "factor": 16.0,
                "original_max_position_embeddings": 16_384,
                "mscale": 1.0,
                "mscale_all_dim": 1.0,
                "llama_4_scaling_beta": 0.1,
            }
        ),
    }

    def configure(self, config: JsonReader, llama: ModelConfig) -> ModelConfig:
        base = super().configure(config, llama)
        return replace(
            base,
            qkv_bias=False,
            out_bias=False,
            mlp_bias=False,
            layers=tempered(config, base),
        )
