"""Granite with windows (IBM, 2026): Granite with sinks, three windowed layers for each global one,
and a rotation of each layer's own."""

from __future__ import annotations

from dataclasses import replace
from typing import ClassVar

from asyncinfer.layers import RopeConfig
from asyncinfer.models.config import ModelConfig
from asyncinfer.models.granite import Granite
from asyncinfer.models.reader import JsonReader
from asyncinfer.models.windows import sliding_layers, windowed

__all__ = ["GraniteSWA"]

_BASES = "layer_rope_theta"
_MOST_BASE = 1e15


class GraniteSWA(Granite):
    """Granite with windows and sinks, such as granite-swash-2b."""

    model_type = "granite_swa"
    defaults: ClassVar = {
        "num_key_value_heads": 4,
        "rms_norm_eps": 1e-5,
        "tie_word_embeddings": True,
        "sliding_window": 128,
    }

    def configure(self, config: JsonReader, llama: ModelConfig) -> ModelConfig:
        granite = super().configure(config, llama)
        slides = sliding_layers(config, granite, lambda layer: layer % 4 != 0)
        base = replace(granite, sinks=True, layers=windowed(config, granite, slides))
        if not config.has(_BASES):
            return base
        bases = config.numbers(_BASES, base.num_layers, 0.0, _MOST_BASE)
        if any(0 < each <= 1 for each in bases):
            raise config.refuse(_BASES, "must be 0, which leaves a layer unrotated, or above 1")
        layers = (
            replace(base.layer(number), rope=_with_base(base.rope, each))
            for number, each in enumerate(bases)
        )
        return replace(base, layers=tuple(layers))


def _with_base(rope: RopeConfig | None, theta: float) -> RopeConfig | None:
    """The rotation with another base; none at 0."""
    return replace(rope, theta=theta) if rope is not None and theta else None
