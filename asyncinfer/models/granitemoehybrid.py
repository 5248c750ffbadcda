"""Granite 4 (IBM, 2025): Mamba-2 in most layers or none, with a mixture of experts or without."""

from __future__ import annotations

from dataclasses import replace
from typing import ClassVar

from asyncinfer.models.config import ModelConfig
from asyncinfer.models.experts import read_experts
from asyncinfer.models.granite import Granite
from asyncinfer.models.mamba import layer_kinds, read_mamba
from asyncinfer.models.names import TensorNames
from asyncinfer.models.parts import MOST_WIDTH, LayerConfig, MixerConfig
from asyncinfer.models.reader import JsonReader
from asyncinfer.models.windows import FULL

__all__ = ["GraniteHybrid"]

_LINEAR = "linear_attention"


class GraniteHybrid(Granite):
    """Granite 4, such as granite-4.0-h-tiny: Mamba-2, attention, experts."""

    model_type = "granitemoehybrid"
    defaults: ClassVar = {
        "vocab_size": 32_000,
        "num_local_experts": 8,
        "num_experts_per_tok": 2,
        "shared_intermediate_size": 1024,
        "mamba_n_heads": 128,
        "mamba_n_groups": 1,
        "mamba_d_state": 256,
        "mamba_d_conv": 4,
        "mamba_expand": 2,
        "mamba_conv_bias": True,
        "mamba_proj_bias": False,
    }

    def configure(self, config: JsonReader, llama: ModelConfig) -> ModelConfig:
        base = super().configure(config, llama)
        shared = config.integer("shared_intermediate_size", 1, MOST_WIDTH)
        up, down = "shared_mlp.input_linear", "shared_mlp.output_linear"
        names = TensorNames(
            up=(up,),
            down=down,
            router="block_sparse_moe.router.layer",
            expert_up=("block_sparse_moe.input_linear.weight",),
            expert_down="block_sparse_moe.output_linear.weight",
            expert_outputs_first=True,
            shared_up=(up,),
            shared_down=down,
        )
        experts, size = None, shared
        if config.integer("num_local_experts", 0, MOST_WIDTH):
            size = llama.intermediate_size
            experts = replace(
                read_experts(config, llama, "num_local_experts", size), shared_size=shared
            )
        return replace(
            base,
            intermediate_size=size,
            experts=experts,
            mlp_bias=False,
            layers=_layers(config, llama),
            names=names,
        )


def _layers(config: JsonReader, llama: ModelConfig) -> tuple[LayerConfig, ...]:
    count = llama.num_layers
    # transformers takes one for the other.
    key = "layer_types" if config.has("layer_types") else "layers_block_type"
    kinds: tuple[str, ...] = (_LINEAR,) * count
    if config.has(key):
        kinds = layer_kinds(config, key, count, (_LINEAR, FULL))
    rotated = config.values.get("position_embedding_type") == "rope"
    attending = LayerConfig(rope=llama.rope if rotated else None)
    mixer: MixerConfig | None = read_mamba(config, llama) if _LINEAR in kinds else None
    return tuple(
        attending if kind == FULL else LayerConfig(rope=None, mixer=mixer) for kind in kinds
    )
