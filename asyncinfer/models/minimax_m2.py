"""MiniMax-M2 (MiniMax, 2025): many experts by sigmoid, norms over all queries and all keys."""

from __future__ import annotations

from dataclasses import replace
from typing import ClassVar

from asyncinfer.layers import RopeConfig
from asyncinfer.models.config import ModelConfig
from asyncinfer.models.experts import read_experts
from asyncinfer.models.family import Family
from asyncinfer.models.mixtral import Mixtral
from asyncinfer.models.reader import JsonReader

__all__ = ["MiniMaxM2"]


class MiniMaxM2(Family):
    """MiniMax-M2: experts by sigmoid, norms over all queries and keys, half of heads rotated."""

    model_type = "minimax_m2"
    defaults: ClassVar = {
        "num_key_value_heads": 8,
        "head_dim": 128,
        "rope_theta": 5_000_000.0,
        "num_local_experts": 256,
        "num_experts_per_tok": 8,
    }
    partial_rotary = True

    def configure(self, config: JsonReader, llama: ModelConfig) -> ModelConfig:
        experts = read_experts(config, llama, "num_local_experts", llama.intermediate_size)
        return replace(
            llama,
            qk_norm="projection",
            rope=_rope(config, llama),
            qkv_bias=False,
            out_bias=False,
            experts=replace(experts, scoring="sigmoid", correction=True),
            names=replace(Mixtral.names, correction="block_sparse_moe.e_score_correction_bias"),
        )


def _rope(config: JsonReader, llama: ModelConfig) -> RopeConfig:
    """The rotation. Published checkpoints give the size of what is rotated, and no part."""
    assert llama.rope is not None
    rope = config.object("rope_scaling") or config.object("rope_parameters")
    stated = config.has("partial_rotary_factor") or (
        rope is not None and rope.has("partial_rotary_factor")
    )
    if stated or not config.has("rotary_dim"):
        return llama.rope
    size = config.integer("rotary_dim", 2, llama.head_dim)
    if size % 2:
        raise config.refuse("rotary_dim", "must be even")
    return replace(llama.rope, size=None if size == llama.head_dim else size)
