"""Granite-MoE (IBM, 2024): Granite with a mixture of experts in every layer."""

from __future__ import annotations

from dataclasses import replace
from typing import ClassVar

from asyncinfer.models.config import ModelConfig
from asyncinfer.models.experts import read_experts
from asyncinfer.models.granite import Granite
from asyncinfer.models.names import TensorNames
from asyncinfer.models.reader import JsonReader

__all__ = ["GraniteMoE"]


class GraniteMoE(Granite):
    """Granite 3 with experts, such as granite-3.1-3b-a800m, and PowerMoE."""

    model_type = "granitemoe"
    defaults: ClassVar = {"num_local_experts": 8, "num_experts_per_tok": 2}

    def configure(self, config: JsonReader, llama: ModelConfig) -> ModelConfig:
        return replace(
            super().configure(config, llama),
            mlp_bias=False,
            experts=read_experts(config, llama, "num_local_experts", llama.intermediate_size),
            names=TensorNames(
                router="block_sparse_moe.router.layer",
                expert_up=("block_sparse_moe.input_linear.weight",),
                expert_down="block_sparse_moe.output_linear.weight",
                expert_outputs_first=True,
            ),
        )
