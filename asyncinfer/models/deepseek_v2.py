"""DeepSeek-V2 (DeepSeek-AI, 2024): as V3, with a softmax over the experts."""

from __future__ import annotations

from dataclasses import replace
from typing import ClassVar

from asyncinfer.models.config import ModelConfig
from asyncinfer.models.deepseek_v3 import DeepSeekV3
from asyncinfer.models.experts import read_grouped_experts
from asyncinfer.models.parts import ExpertsConfig
from asyncinfer.models.reader import JsonReader

__all__ = ["DeepSeekV2"]


class DeepSeekV2(DeepSeekV3):
    """DeepSeek-V2 and V2-Lite: latent attention, experts, two of them shared."""

    model_type = "deepseek_v2"
    defaults: ClassVar = {
        **DeepSeekV3.defaults,
        "n_routed_experts": 64,
        "moe_intermediate_size": 1407,
        "n_shared_experts": 2,
        "n_group": None,
        "topk_group": None,
        "topk_method": "greedy",
        "norm_topk_prob": False,
        "routed_scaling_factor": 1.0,
        "first_k_dense_replace": 0,
    }

    def experts(self, config: JsonReader, llama: ModelConfig) -> ExpertsConfig:
        method = config.string("topk_method")
        if method not in ("greedy", "group_limited_greedy"):
            raise config.refuse("topk_method", "must be greedy or group_limited_greedy")
        if config.boolean("norm_topk_prob", False):
            raise config.refuse("norm_topk_prob", "is not supported")
        whole = {"n_group": 1, "topk_group": 1}
        if method == "greedy":
            config = JsonReader({**config.values, **whole}, config.file)
        base = read_grouped_experts(config, llama)
        return replace(base, scoring="softmax", correction=False, group_best=1)
