"""OLMo 3 (OLMo team, 2025): OLMo 2 with a window in three of four layers."""

from __future__ import annotations

from dataclasses import replace
from typing import ClassVar

from asyncinfer.models.config import ModelConfig
from asyncinfer.models.olmo2 import OLMo2
from asyncinfer.models.reader import JsonReader
from asyncinfer.models.rope_parameters import read_rope
from asyncinfer.models.windows import FULL, SLIDING, sliding_layers, windowed

__all__ = ["OLMo3"]


class OLMo3(OLMo2):
    """OLMo 3, such as Olmo-3-7B-Instruct: OLMo 2 with three windowed layers for each global one."""

    model_type = "olmo3"
    defaults: ClassVar = {**OLMo2.defaults, "rope_theta": 500_000.0, "sliding_window": 4096}
    full_rope = FULL

    def configure(self, config: JsonReader, llama: ModelConfig) -> ModelConfig:
        # Scaling that stands beside the layers' parameters is meant for the global ones.
        local = read_rope(
            config.renamed(rope_scaling=""), llama.max_context, llama.head_dim, SLIDING
        )
        sliding = sliding_layers(config, llama, lambda layer: (layer + 1) % 4 != 0)
        layers = windowed(config, llama, sliding, local)
        return replace(super().configure(config, llama), layers=layers)
