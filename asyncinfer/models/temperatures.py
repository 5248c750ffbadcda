"""Reads the attention temperatures of `config.json`."""

from __future__ import annotations

from dataclasses import replace

from asyncinfer.layers import AttentionTemperature
from asyncinfer.models.config import ModelConfig
from asyncinfer.models.parts import LayerConfig
from asyncinfer.models.reader import JsonReader

__all__ = ["tempered"]


def tempered(config: JsonReader, llama: ModelConfig) -> tuple[LayerConfig, ...]:
    """The layers of `llama`, each with the temperature that Mistral's configs have beside the
    settings of the rotation; unchanged where there is none."""
    rope = config.object("rope_scaling") or config.object("rope_parameters")
    scale = 0.0 if rope is None else rope.number("llama_4_scaling_beta", 0.0, 1e3, 0.0)
    if rope is None or scale == 0.0:
        return llama.layers
    period = rope.integer("original_max_position_embeddings", 1, 2**31 - 1)
    temperature = AttentionTemperature(scale=scale, period=period)
    return tuple(
        replace(llama.layer(index), temperature=temperature) for index in range(llama.num_layers)
    )
