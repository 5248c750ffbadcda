"""Hunyuan (Tencent, 2025), dense: norms of queries and keys after the rotation."""

from __future__ import annotations

from dataclasses import replace
from typing import ClassVar

from asyncinfer.layers import RopeConfig
from asyncinfer.models.config import ModelConfig
from asyncinfer.models.family import Family
from asyncinfer.models.names import TensorNames
from asyncinfer.models.reader import JsonReader

__all__ = ["HunyuanDense"]

_ALPHA = (1.0, 1e6)


class HunyuanDense(Family):
    """Hunyuan, dense, such as Hunyuan-7B-Instruct: norms of heads after the rotation."""

    model_type = "hunyuan_v1_dense"
    defaults: ClassVar = {"rms_norm_eps": 1e-5}

    def configure(self, config: JsonReader, llama: ModelConfig) -> ModelConfig:
        names = TensorNames(q_norm="self_attn.query_layernorm", k_norm="self_attn.key_layernorm")
        llama = replace(llama, qk_norm="rotated-head", mlp_bias=False, names=names)
        scaling = config.object("rope_scaling") or config.object("rope_parameters")
        rope = llama.rope
        if scaling is None or rope is None or rope.rope_type != "dynamic":
            return llama
        if not scaling.has("alpha"):
            return llama
        # Called dynamic, but the base is stretched once, whatever the length.
        size = llama.head_dim
        theta = rope.theta * scaling.number("alpha", *_ALPHA) ** (size / (size - 2))
        context = rope.original_context
        return replace(
            llama,
            rope=RopeConfig(theta=theta, original_context=context),
            max_context=context,
        )
