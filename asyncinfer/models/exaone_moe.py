"""K-EXAONE (LG AI Research, 2026): EXAONE 4's attention with norms before each part, and experts
as DeepSeek-V3 has them."""

from __future__ import annotations

from dataclasses import replace
from typing import ClassVar

from asyncinfer.models.config import ModelConfig
from asyncinfer.models.exaone4 import Exaone4
from asyncinfer.models.experts import read_grouped_experts, sparse_by_list, with_experts
from asyncinfer.models.names import TensorNames
from asyncinfer.models.reader import JsonReader

__all__ = ["ExaoneMoE"]


class ExaoneMoE(Exaone4):
    """K-EXAONE-236B-A23B: windows, experts by sigmoid, one shared."""

    model_type = "exaone_moe"
    keys: ClassVar = {"n_routed_experts": "num_experts", "n_shared_experts": "num_shared_experts"}
    defaults: ClassVar = {
        **Exaone4.defaults,
        "num_experts": 64,
        "num_experts_per_tok": 8,
        "moe_intermediate_size": 1024,
        "num_shared_experts": 1,
        "norm_topk_prob": True,
        "routed_scaling_factor": 2.5,
        "n_group": 1,
        "topk_group": 1,
        "first_k_dense_replace": 1,
    }

    def configure(self, config: JsonReader, llama: ModelConfig) -> ModelConfig:
        base = super().configure(config, llama)
        base = replace(
            base,
            block="pre",
            experts=read_grouped_experts(config, llama),
            names=TensorNames(
                correction="mlp.e_score_correction_bias",
                ignored=(*base.names.ignored, r"mtp\..*"),
            ),
        )
        return with_experts(base, sparse_by_list(config, llama.num_layers, llama.rope))
