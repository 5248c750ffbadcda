"""Keys that the configs of models with gated delta nets share."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Final

from asyncinfer.models.config import ModelConfig
from asyncinfer.models.names import PredictorNames, TensorNames
from asyncinfer.models.parts import (
    MOST_HEAD_DIM,
    MOST_HEADS,
    MOST_LAYERS,
    GatedDeltaConfig,
    LayerConfig,
)
from asyncinfer.models.reader import JsonReader
from asyncinfer.models.windows import FULL

__all__ = ["DELTA_DEFAULTS", "delta_net", "linear_layers", "with_delta_nets"]

_LINEAR = "linear_attention"
#: Defaults of keys that the configs of models with gated delta nets may omit.
DELTA_DEFAULTS: Final[Mapping[str, int | float]] = {
    "num_attention_heads": 16,
    "head_dim": 256,
    "partial_rotary_factor": 0.25,
    "max_position_embeddings": 32_768,
    "linear_conv_kernel_dim": 4,
    "linear_key_head_dim": 128,
    "linear_value_head_dim": 128,
    "linear_num_key_heads": 16,
    "linear_num_value_heads": 32,
}


def with_delta_nets(config: JsonReader, llama: ModelConfig) -> ModelConfig:
    """`llama` with gated delta nets in its linear layers and gated attention in the others."""
    return replace(
        llama,
        norm="rms-plus-one",
        qk_norm="head",
        attention_gate=True,
        mlp_bias=False,
        layers=_layers(config, llama),
        names=TensorNames(
            shared_up=("mlp.shared_expert.gate_proj", "mlp.shared_expert.up_proj"),
            shared_down="mlp.shared_expert.down_proj",
            predictor=PredictorNames(
                prefix="mtp.",
                layer="layers.0.",
                join="fc",
                token_norm="pre_fc_norm_embedding",
                hidden_norm="pre_fc_norm_hidden",
                norm="norm",
            ),
        ),
    )


def _layers(config: JsonReader, llama: ModelConfig) -> tuple[LayerConfig, ...]:
    every = config.integer("full_attention_interval", 1, MOST_LAYERS, 4)
    mixer = delta_net(config)
    return tuple(
        LayerConfig(rope=None, mixer=mixer) if linear else LayerConfig(rope=llama.rope)
        for linear in linear_layers(config, llama.num_layers, every)
    )


def linear_layers(config: JsonReader, count: int, every: int) -> tuple[bool, ...]:
    """Whether each of `count` layers is linear, by `layer_types`; without that list, all but the
    last of `every` layers are."""
    if not config.has("layer_types"):
        return tuple((layer + 1) % every != 0 for layer in range(count))
    kinds = config.strings("layer_types", count, (_LINEAR, FULL))
    return tuple(kind == _LINEAR for kind in kinds)


def delta_net(config: JsonReader) -> GatedDeltaConfig:
    """The shape of the gated delta nets. Raises `ModelLoadError`, also for an activation that these
    nets do not have."""
    if config.string("hidden_act", "silu") != "silu":
        raise config.refuse("hidden_act", "must be silu: gated delta nets have no other")
    key_heads = config.integer("linear_num_key_heads", 1, MOST_HEADS)
    heads = config.integer("linear_num_value_heads", 1, MOST_HEADS)
    if heads % key_heads:
        bound = f"must be a multiple of linear_num_key_heads={key_heads}"
        raise config.refuse("linear_num_value_heads", bound)
    return GatedDeltaConfig(
        key_heads=key_heads,
        heads=heads,
        key_dim=config.integer("linear_key_head_dim", 1, MOST_HEAD_DIM),
        value_dim=config.integer("linear_value_head_dim", 1, MOST_HEAD_DIM),
        width=config.integer("linear_conv_kernel_dim", 2, 1 << 10),
    )
