"""ERNIE 4.5 with experts (Baidu, 2025): a softmax, a bias for the choice alone, shared experts."""

from __future__ import annotations

from dataclasses import replace
from typing import ClassVar

from asyncinfer.models.config import ModelConfig
from asyncinfer.models.ernie4_5 import Ernie45
from asyncinfer.models.experts import read_experts
from asyncinfer.models.parts import MOST_LAYERS, MOST_WIDTH, ExpertsConfig
from asyncinfer.models.reader import JsonReader

__all__ = ["Ernie45MoE"]

#: The largest `moe_norm_min` that is read. A token's weights are not divided by less than that: the
#: scores of its experts sum to so little only where the bias outweighs every score.
_MOST_LEAST_SUM = 1e-9


class Ernie45MoE(Ernie45):
    """ERNIE 4.5 with experts, such as ERNIE-4.5-21B-A3B-PT."""

    model_type = "ernie4_5_moe"
    keys: ClassVar = {**Ernie45.keys, "num_experts_per_tok": "moe_k"}
    defaults: ClassVar = {
        "rms_norm_eps": 1e-5,
        "num_key_value_heads": 4,
        "rope_theta": 500_000.0,
        "tie_word_embeddings": True,
        "moe_num_experts": 64,
        "moe_k": 6,
        "moe_intermediate_size": 1536,
        "moe_num_shared_experts": 2,
        "moe_layer_start_index": 1,
        "moe_layer_end_index": -1,
        "moe_layer_interval": 1,
    }

    def configure(self, config: JsonReader, llama: ModelConfig) -> ModelConfig:
        base = super().configure(config, llama)
        return replace(
            base,
            head_bias=llama.mlp_bias,
            experts=_experts(config, llama),
            layers=tuple(
                replace(base.layer(layer), experts=has)
                for layer, has in enumerate(_has_experts(config, llama.num_layers))
            ),
            names=replace(
                base.names,
                correction="mlp.moe_statics.e_score_correction_bias",
                # What predicts further tokens.
                ignored=(*base.names.ignored, r"model\.mtp_.*"),
            ),
        )


def _experts(config: JsonReader, llama: ModelConfig) -> ExpertsConfig:
    size = config.integer("moe_intermediate_size", 1, MOST_WIDTH)
    config.number("moe_norm_min", 0.0, _MOST_LEAST_SUM, 1e-12)
    return replace(
        read_experts(config, llama, "moe_num_experts", size),
        correction=True,
        shared_size=size * config.integer("moe_num_shared_experts", 0, 64),
    )


def _has_experts(config: JsonReader, layers: int) -> list[bool]:
    first = config.integer("moe_layer_start_index", 0, MOST_LAYERS)
    last = config.integer("moe_layer_end_index", -1, MOST_LAYERS)
    every = config.integer("moe_layer_interval", 1, MOST_LAYERS)
    last = layers - 1 if last == -1 else last
    return [first <= layer <= last and (layer + 1) % every == 0 for layer in range(layers)]
