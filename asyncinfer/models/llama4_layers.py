"""The layers of Llama 4: which of them are rotated and attend in chunks, and which have experts."""

from __future__ import annotations

from typing import Final

from asyncinfer.layers import AttentionTemperature
from asyncinfer.models.config import ModelConfig
from asyncinfer.models.parts import MOST_LAYERS, LayerConfig
from asyncinfer.models.reader import JsonReader
from asyncinfer.models.windows import FULL, MOST_WINDOW

__all__ = ["llama4_layers"]

_CHUNKED: Final = "chunked_attention"
_MOST_PERIOD: Final = 2**31 - 1


def llama4_layers(config: JsonReader, llama: ModelConfig) -> tuple[LayerConfig, ...]:
    """The layers of a config; `llama` has the rotation of the rotated ones."""
    count = llama.num_layers
    every = config.integer("no_rope_layer_interval", 1, MOST_LAYERS, 4)
    rotated = tuple(int((layer + 1) % every != 0) for layer in range(count))
    if config.values.get("no_rope_layers"):
        # A one in the list means a rotated layer.
        rotated = config.integers("no_rope_layers", count, 0, 1)
    kinds = tuple(_CHUNKED if turned else FULL for turned in rotated)
    if config.has("layer_types"):
        kinds = config.strings("layer_types", count, (_CHUNKED, FULL))
    chunk: int | None = None
    if config.has("attention_chunk_size"):
        chunk = config.integer("attention_chunk_size", 1, MOST_WINDOW)
    if chunk is not None and chunk >= llama.max_context:
        chunk = None
    sparse = _with_experts(config, count)
    temperature = _temperature(config)
    return tuple(
        LayerConfig(
            rope=llama.rope if turned else None,
            window=chunk if kind == _CHUNKED else None,
            chunked=kind == _CHUNKED and chunk is not None,
            qk_norm=bool(turned),
            temperature=None if turned else temperature,
            experts=layer in sparse,
        )
        for layer, (turned, kind) in enumerate(zip(rotated, kinds, strict=True))
    )


def _temperature(config: JsonReader) -> AttentionTemperature | None:
    """The temperature of layers that are not rotated."""
    scale = config.number("attn_scale", 0.0, 1e3)
    period = config.integer("floor_scale", 1, _MOST_PERIOD)
    if not _tuned(config) or not scale:
        return None
    return AttentionTemperature(scale=scale, period=period, offset=1)


def _tuned(config: JsonReader) -> bool:
    key = "attn_temperature_tuning"
    # The first configs have a number in place of a boolean.
    if type(config.values.get(key)) is int:
        return config.integer(key, 0, MOST_LAYERS) > 0
    return config.boolean(key, True)


def _with_experts(config: JsonReader, count: int) -> frozenset[int]:
    """Which of `count` layers have experts."""
    if config.has("moe_layers"):
        return frozenset(config.integers("moe_layers", None, 0, MOST_LAYERS))
    every = config.integer("interleave_moe_layer_step", 1, MOST_LAYERS, 1)
    return frozenset(range(every - 1, count, every))
