"""Llama 4 (Meta, 2025), its text: chunked attention with a rotation in most layers, all tokens and
no rotation in the others, whose queries grow with their position; experts beside a shared one."""

from __future__ import annotations

from dataclasses import replace
from typing import ClassVar, Final

from asyncinfer.models.config import ModelConfig
from asyncinfer.models.experts import read_experts
from asyncinfer.models.family import Family
from asyncinfer.models.llama4_layers import llama4_layers
from asyncinfer.models.names import TensorNames
from asyncinfer.models.parts import MOST_WIDTH, ExpertsConfig
from asyncinfer.models.reader import JsonReader

__all__ = ["Llama4"]

_WIDTH: Final = "intermediate_size"
_LAYER: Final = "feed_forward"
_NAMES: Final = TensorNames(
    up=(f"{_LAYER}.gate_proj", f"{_LAYER}.up_proj"),
    down=f"{_LAYER}.down_proj",
    router=f"{_LAYER}.router",
    shared_up=(f"{_LAYER}.shared_expert.gate_proj", f"{_LAYER}.shared_expert.up_proj"),
    shared_down=f"{_LAYER}.shared_expert.down_proj",
    expert_up=(f"{_LAYER}.experts.gate_up_proj",),
    expert_down=f"{_LAYER}.experts.down_proj",
)


class Llama4(Family):
    """Llama 4, text: chunked attention, experts beside a shared one."""

    model_type = "llama4_text"
    #: The width of layers without experts.
    keys: ClassVar = {_WIDTH: "intermediate_size_mlp"}
    defaults: ClassVar = {
        "vocab_size": 202_048,
        "hidden_size": 5120,
        "intermediate_size": 8192,
        "intermediate_size_mlp": 16_384,
        "num_hidden_layers": 48,
        "num_attention_heads": 40,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "max_position_embeddings": 131_072,
        "rms_norm_eps": 1e-5,
        "rope_theta": 500_000.0,
        "num_experts_per_tok": 1,
        "num_local_experts": 16,
        "attention_chunk_size": 8192,
        "floor_scale": 8192,
        "attn_scale": 0.1,
    }

    def configure(self, config: JsonReader, llama: ModelConfig) -> ModelConfig:
        assert llama.rope is not None
        llama = replace(llama, rope=replace(llama.rope, interleaved=True))
        normed = config.boolean("use_qk_norm", True)
        return replace(
            llama,
            qk_norm="rotated-head" if normed else None,
            qk_norm_weight=not normed,
            layers=llama4_layers(config, llama),
            experts=_experts(config, llama),
            mlp_bias=False,
            names=_NAMES,
        )


def _experts(config: JsonReader, llama: ModelConfig) -> ExpertsConfig:
    size = config.renamed(**{_WIDTH: _WIDTH}).integer(_WIDTH, 1, MOST_WIDTH)
    experts = read_experts(config, llama, "num_local_experts", size)
    return replace(experts, scoring="sigmoid", normalise=False, weigh_inputs=True, shared_size=size)
