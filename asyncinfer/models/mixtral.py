"""Mixtral (Jiang et al., 2024): Mistral with a mixture of experts."""

from __future__ import annotations

from dataclasses import replace
from typing import ClassVar

from asyncinfer.models.config import ModelConfig
from asyncinfer.models.experts import read_experts
from asyncinfer.models.family import Family
from asyncinfer.models.names import TensorNames
from asyncinfer.models.reader import JsonReader
from asyncinfer.models.windows import windowed

__all__ = ["Mixtral"]


class Mixtral(Family):
    """Mixtral: eight experts in every layer, two for each token."""

    model_type = "mixtral"
    defaults: ClassVar = {
        "num_key_value_heads": 8,
        "num_local_experts": 8,
        "num_experts_per_tok": 2,
        "rms_norm_eps": 1e-5,
        "rope_theta": 1_000_000.0,
    }
    names: ClassVar = TensorNames(
        router="block_sparse_moe.gate",
        expert_up=("block_sparse_moe.experts.{}.w1", "block_sparse_moe.experts.{}.w3"),
        expert_down="block_sparse_moe.experts.{}.w2",
    )

    def configure(self, config: JsonReader, llama: ModelConfig) -> ModelConfig:
        return replace(
            llama,
            layers=windowed(config, llama),
            experts=read_experts(config, llama, "num_local_experts", llama.intermediate_size),
            names=self.names,
        )
