"""OLMo 2 (OLMo team, 2025): Llama with norms after attention and feed-forward, not before."""

from __future__ import annotations

from dataclasses import replace
from typing import ClassVar

from asyncinfer.models.config import ModelConfig
from asyncinfer.models.family import Family
from asyncinfer.models.reader import JsonReader

__all__ = ["OLMo2"]


class OLMo2(Family):
    """OLMo 2: post-norm, and norms over all queries and over all keys."""

    model_type = "olmo2"
    defaults: ClassVar = {"rms_norm_eps": 1e-5}

    def configure(self, config: JsonReader, llama: ModelConfig) -> ModelConfig:
        return replace(llama, block="post", qk_norm="projection")
