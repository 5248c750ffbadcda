"""Hunyuan (Tencent, 2025) with experts beside a shared one."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any, ClassVar

from asyncinfer.models.config import ModelConfig
from asyncinfer.models.experts import read_experts
from asyncinfer.models.hunyuan_v1_dense import HunyuanDense
from asyncinfer.models.reader import JsonReader

__all__ = ["HunyuanMoE"]


class HunyuanMoE(HunyuanDense):
    """Hunyuan with experts, such as Hunyuan-A13B-Instruct: one shared, norms after the rotation."""

    model_type = "hunyuan_v1_moe"
    keys: ClassVar = {"num_experts_per_tok": "moe_topk"}
    defaults: ClassVar = {**HunyuanDense.defaults, "num_experts": 1, "moe_topk": 1}

    def complete(self, values: Mapping[str, Any]) -> Mapping[str, Any]:
        """With a number in the place of a list of equal ones, one for each layer."""
        whole = dict(super().complete(values))
        each = whole["moe_topk"]
        if isinstance(each, list) and len(each) and each.count(each[0]) == len(each):
            whole["moe_topk"] = each[0]
        return whole

    def configure(self, config: JsonReader, llama: ModelConfig) -> ModelConfig:
        base = super().configure(config, llama)
        size = llama.intermediate_size
        experts = replace(read_experts(config, llama, "num_experts", size), shared_size=size)
        shared = "mlp.shared_mlp"
        return replace(
            base,
            experts=experts,
            names=replace(
                base.names,
                router="mlp.gate.wg",
                shared_up=(f"{shared}.gate_proj", f"{shared}.up_proj"),
                shared_down=f"{shared}.down_proj",
            ),
        )
