"""The layers of Kimi Linear: which have Kimi Delta Attention, and which experts."""

from __future__ import annotations

from dataclasses import replace
from typing import Final

from asyncinfer.models.experts import sparse_by_list
from asyncinfer.models.parts import MOST_HEAD_DIM, MOST_HEADS, KimiDeltaConfig, LayerConfig
from asyncinfer.models.reader import JsonReader
from asyncinfer.models.windows import FULL

__all__ = ["OWN", "kimi_layers"]

#: What published configs say of Kimi Delta Attention is an object of this name.
OWN: Final = "linear_attn_config"
_LINEAR: Final = "linear_attention"


def kimi_layers(config: JsonReader, count: int) -> tuple[LayerConfig, ...]:
    """The `count` layers of a config."""
    if config.string("hidden_act", "silu") != "silu":
        raise config.refuse("hidden_act", "must be silu: Kimi Delta Attention has no other")
    mixer = KimiDeltaConfig(
        heads=config.integer("linear_num_heads", 1, MOST_HEADS),
        head_dim=config.integer("linear_head_dim", 1, MOST_HEAD_DIM),
        width=config.integer("linear_conv_kernel_dim", 2, 1 << 10),
    )
    sparse = sparse_by_list(config, count, None) or [LayerConfig(rope=None)] * count
    return tuple(
        replace(layer, mixer=mixer) if linear else layer
        for layer, linear in zip(sparse, _linear(config, count), strict=True)
    )


def _linear(config: JsonReader, count: int) -> list[bool]:
    """For each of `count` layers whether it has Kimi Delta Attention."""
    own = config.object(OWN)
    if config.has("layer_types"):
        return [kind == _LINEAR for kind in config.strings("layer_types", count, (_LINEAR, FULL))]
    if own is None or not (own.has("kda_layers") and own.has("full_attn_layers")):
        return [layer == 0 or layer % 4 != 0 for layer in range(count)]
    # Published configs count from one.
    linear, full = (set(own.integers(f"{k}_layers", None, 1, count)) for k in ("kda", "full_attn"))
    if linear & full or len(linear | full) != count:
        raise own.refuse("kda_layers", "must be the layers that full_attn_layers lacks")
    return [layer + 1 in linear for layer in range(count)]
