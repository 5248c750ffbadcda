"""LFM2 (Liquid AI, 2025): short convolutions in most layers, attention in the others."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import ClassVar

from asyncinfer.models.config import ModelConfig
from asyncinfer.models.family import Family
from asyncinfer.models.names import TensorNames
from asyncinfer.models.parts import MOST_WIDTH, LayerConfig, ShortConvConfig
from asyncinfer.models.reader import JsonReader
from asyncinfer.models.windows import FULL

__all__ = ["LFM2"]

_CONVOLUTION = "conv"
_MOST_FACTOR = 1 << 10


class LFM2(Family):
    """LFM2, dense, such as LFM2-1.2B."""

    model_type = "lfm2"
    keys: ClassVar = {"rms_norm_eps": "norm_eps"}
    defaults: ClassVar = {
        "norm_eps": 1e-5,
        "num_key_value_heads": 8,
        "tie_word_embeddings": True,
        "rope_theta": 1_000_000.0,
        "max_position_embeddings": 128_000,
    }

    def configure(self, config: JsonReader, llama: ModelConfig) -> ModelConfig:
        return replace(
            llama,
            intermediate_size=self.width(config, llama),
            activation="silu",
            qk_norm="head",
            qkv_bias=False,
            out_bias=False,
            mlp_bias=False,
            layers=_layers(config, llama),
            tied_head=config.boolean("tie_embedding", llama.tied_head),
            names=TensorNames(
                attention_norm="operator_norm",
                mlp_norm="ffn_norm",
                out="self_attn.out_proj",
                q_norm="self_attn.q_layernorm",
                k_norm="self_attn.k_layernorm",
                up=("feed_forward.w1", "feed_forward.w3"),
                down="feed_forward.w2",
                norm="embedding_norm",
            ),
        )

    def width(self, config: JsonReader, llama: ModelConfig) -> int:
        """The size of the feed-forward layers: two thirds of the stated one, times a factor, up to
        a multiple, unless it is meant as it is stated."""
        size = config.integer("block_ff_dim", 1, MOST_WIDTH, llama.intermediate_size)
        if not config.boolean("block_auto_adjust_ff_dim", True):
            return size
        size, factor = int(2 * size / 3), "block_ffn_dim_multiplier"
        if factor not in config.values or config.has(factor):
            size = int(config.number(factor, 1e-3, _MOST_FACTOR, 1.0) * size)
            multiple = config.integer("block_multiple_of", 1, MOST_WIDTH, 256)
            size = -(-size // multiple) * multiple
        if not 0 < size <= MOST_WIDTH:
            raise config.refuse("intermediate_size", f"gives feed-forward layers {size} wide")
        return size


def _layers(config: JsonReader, llama: ModelConfig) -> tuple[LayerConfig, ...]:
    count = llama.num_layers
    if config.has("layer_types"):
        kinds = config.strings("layer_types", count, (_CONVOLUTION, FULL))
    else:
        attending: Sequence[int] = range(count)
        if config.has("full_attn_idxs"):
            attending = config.integers("full_attn_idxs", None, 0, 1 << 10)
        kinds = tuple(FULL if layer in attending else _CONVOLUTION for layer in range(count))
    convolution = ShortConvConfig(
        width=config.integer("conv_L_cache", 2, 1 << 10, 3),
        bias=config.boolean("conv_bias", False),
    )
    return tuple(
        LayerConfig(rope=llama.rope) if kind == FULL else LayerConfig(rope=None, mixer=convolution)
        for kind in kinds
    )
