"""Bamba (IBM, Princeton, CMU and UIUC, 2024): Mamba-2 in most layers, attention in a few. The model
is computed as transformers' `modeling_bamba.py` does."""

from __future__ import annotations

from dataclasses import replace
from typing import ClassVar

from asyncinfer.models import (
    Family,
    JsonReader,
    LayerConfig,
    ModelConfig,
    TensorNames,
    read_mamba,
)

__all__ = ["Bamba"]

_MOST_LAYERS = 1 << 10


class Bamba(Family):
    """Bamba, such as Bamba-9B-v2: layers of Mamba-2, whose state the engine keeps, and attention
    with half of each head rotated."""

    model_type = "bamba"
    partial_rotary = True
    defaults: ClassVar = {
        "vocab_size": 128_000,
        "hidden_size": 4096,
        "intermediate_size": 14_336,
        "num_key_value_heads": 8,
        "rms_norm_eps": 1e-5,
        "max_position_embeddings": 262_144,
        "partial_rotary_factor": 0.5,
        "mamba_n_heads": 128,
        "mamba_n_groups": 1,
        "mamba_d_state": 256,
        "mamba_d_conv": 4,
        "mamba_expand": 2,
        "mamba_conv_bias": True,
        "mamba_proj_bias": False,
    }

    def configure(self, config: JsonReader, llama: ModelConfig) -> ModelConfig:
        attending: tuple[int, ...] = ()
        if config.has("attn_layer_indices"):
            attending = tuple(config.integers("attn_layer_indices", None, 0, _MOST_LAYERS))
        state = LayerConfig(rope=None, mixer=read_mamba(config, llama))
        return replace(
            llama,
            layers=tuple(
                LayerConfig(rope=llama.rope) if layer in attending else state
                for layer in range(llama.num_layers)
            ),
            names=TensorNames(
                mlp_norm="pre_ff_layernorm",
                up=("feed_forward.gate_proj", "feed_forward.up_proj"),
                down="feed_forward.down_proj",
                norm="final_layernorm",
            ),
        )
