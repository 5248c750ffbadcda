"""Granite (IBM, 2024): Llama with multipliers in four places."""

from __future__ import annotations

from dataclasses import replace

from asyncinfer.models.config import ModelConfig
from asyncinfer.models.family import Family
from asyncinfer.models.reader import JsonReader

__all__ = ["Granite"]

_MULTIPLIER = (1e-6, 1e6)


class Granite(Family):
    """Granite 3, dense."""

    model_type = "granite"

    def configure(self, config: JsonReader, llama: ModelConfig) -> ModelConfig:
        return replace(
            llama,
            embedding_scale=config.number("embedding_multiplier", *_MULTIPLIER, 1.0),
            attention_scale=config.number("attention_multiplier", *_MULTIPLIER, 1.0),
            residual_scale=config.number("residual_multiplier", *_MULTIPLIER, 1.0),
            logit_scale=1 / config.number("logits_scaling", *_MULTIPLIER, 1.0),
        )
